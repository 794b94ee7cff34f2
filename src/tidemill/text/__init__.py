"""Tokenizer and detokenizer processes, chat templates, stop strings. May import `wire`, `config`.

Never imports torch.
"""
