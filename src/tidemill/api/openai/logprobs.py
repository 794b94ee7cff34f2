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
    entries: Sequence[LogprobText | None] | None, offset: int
) -> dict[str, Any] | None:
    """`offset`: characters of the text before the first entry."""
    if entries is None:
        return None
    made: dict[str, list[Any]] = {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": [],
    }
    for entry in entries:
        made["text_offset"].append(offset)
        if entry is None:
            for key, value in (("tokens", ""), ("token_logprobs", None), ("top_logprobs", None)):
                made[key].append(value)
            continue
        made["tokens"].append(entry.token)
        made["token_logprobs"].append(entry.logprob)
        top = {text: value for text, _, _, value in reversed(entry.top)}
        made["top_logprobs"].append(top | {entry.token: entry.logprob} if top else None)
        offset += len(entry.token)
    return made


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
