"""Everything an engine can be told, in one frozen structure.

Every process receives the same `EngineConfig`, encoded as JSON. It is never changed after
start; what is *measured* at start (KV pages, context that fits) travels in `RunnerReady`.
This module imports neither torch nor anything that needs a device.
"""

from __future__ import annotations

from typing import Literal

import msgspec

DTypeName = Literal["auto", "float32", "bfloat16", "float16"]
LoadFormat = Literal["auto", "gguf", "safetensors", "dummy"]
DeviceName = Literal["auto", "cpu", "cuda"]


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's settings. Field names are the command line's flag names.

    `model` is a resolved local path once processes start (see `tidemill.hub.resolve`).
    """

    # Model
    model: str
    served_model_name: str | None = None
    load_format: LoadFormat = "auto"
    dtype: DTypeName = "auto"  # "float32" is the exact mode: plain torch, no quantized kernels
    device: DeviceName = "auto"
    tokenizer: str | None = None  # folder or tokenizer.json; None: from the model
    chat_template: str | None = None  # a file; None: from the model
    seed: int = 0  # for requests that bring no seed, and for dummy weights

    # Capacity
    max_model_len: int | None = None  # tokens, prompt + output; None: the model's, if it fits
    max_running_requests: int | None = None  # slots; None: 64 on CPU, 256 on GPU
    max_batch_tokens: int | None = None  # token budget of one step; None: by device
    kv_memory: int | None = None  # bytes; None: from measured free memory
    page_size: int = 16  # tokens
    max_waiting_requests: int = 2048  # beyond it a request is refused with 429

    # Execution
    run_ahead: int = 1  # steps planned beyond the one that executes; 0 is synchronous
    prefix_cache: bool = True
    threads: int | None = None  # CPU compute threads; None: physical cores
    native: bool = True  # use the compiled CPU kernels where they were built

    # Processes and network
    host: str = "127.0.0.1"
    port: int = 8000
    servers: int = 1
    tokenizers: int = 1
    detokenizers: int = 1
    run_dir: str = ""  # sockets and rings; set by the supervisor
    drain_timeout: float = 30.0  # seconds
    max_body_bytes: int = 8 << 20
    max_choices: int = 128  # limit of n, and of prompts in one completion request
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @property
    def model_name(self) -> str:
        """The name clients use."""
        name = self.served_model_name or self.model.rstrip("/").rsplit("/", 1)[-1]
        return name.removesuffix(".gguf")


def encode(config: EngineConfig) -> str:
    return msgspec.json.encode(config).decode()


def decode(text: str) -> EngineConfig:
    return msgspec.json.decode(text, type=EngineConfig)
