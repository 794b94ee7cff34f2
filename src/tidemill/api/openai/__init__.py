"""OpenAI's protocol: chat completions, completions, models, tokenize and detokenize."""
