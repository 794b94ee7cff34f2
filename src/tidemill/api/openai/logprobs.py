"""Log-probabilities in the shapes that OpenAI's clients expect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tidemill.wire.messages import LogprobText


def chat_logprobs(entries: Sequence[LogprobText] | None) -> dict[str, Any] | None:
    if entries is None:
        return None
    content = [
        {
            "token": entry.token,
            "logprob": entry.logprob,
            "bytes": entry.bytes,
            "top_logprobs": [
                {"token": text, "logprob": value, "bytes": raw} for text, _, raw, value in entry.top
            ],
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    prompt: Sequence[LogprobText | None],
    prompt_text: str,
    output: Sequence[LogprobText],
    offset: int,
) -> dict[str, list[Any]] | None:
    """Entries of an echoed prompt, if any, and of output tokens, as parallel lists.

    `offset`: characters of the answer before the first entry. Nothing predicts a prompt's first
    token, so its entry is None; its text is what the others leave of the prompt's.
    """
    made: dict[str, list[Any]] = {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": [],
    }
    for entry in (*prompt, *output):
        if entry is None:
            rest = sum(len(each.token) for each in prompt if each is not None)
            token, logprob, top = prompt_text[: max(0, len(prompt_text) - rest)], None, None
        else:
            token, logprob = entry.token, entry.logprob
            top = {text: value for text, _, _, value in reversed(entry.top)} or None
            if top is not None:
                top[token] = logprob
        made["tokens"].append(token)
        made["token_logprobs"].append(logprob)
        made["top_logprobs"].append(top)
        made["text_offset"].append(offset)
        offset += len(token)
    return made if made["tokens"] else None


def prompt_logprobs(entries: Sequence[LogprobText | None] | None) -> list[Any] | None:
    """vLLM's shape: for each position the tokens by id, the prompt's own among them."""
    if entries is None:
        return None
    return [None if entry is None else _by_id(entry) for entry in entries]


def _by_id(entry: LogprobText) -> dict[str, Any]:
    made = {
        str(index): {"logprob": value, "rank": rank + 1, "decoded_token": text}
        for rank, (text, index, _, value) in enumerate(entry.top)
    }
    made.setdefault(
        str(entry.token_id),
        {"logprob": entry.logprob, "rank": None, "decoded_token": entry.token},
    )
    return made
