"""The tokenizer: text and chats to ids, for the servers that ask. Stateless between calls."""

from __future__ import annotations

import logging

import zmq

from tidemill.config import EngineConfig
from tidemill.text import vocabulary
from tidemill.text.chat import ChatError, ChatTemplate
from tidemill.text.vocabulary import Vocabulary
from tidemill.wire.endpoints import Endpoints
from tidemill.wire.messages import (
    DetokenizeIds,
    ErrorInfo,
    TokenizeChat,
    Tokenized,
    TokenizeText,
    bytes_to_ids,
    ids_to_bytes,
)
from tidemill.wire.sockets import Receiver, Sender
from tidemill.wire.status import StatusReporter

log = logging.getLogger(__name__)

Call = TokenizeText | TokenizeChat | DetokenizeIds


class TokenizerService:
    """Answers calls; never raises for what a client sent."""

    def __init__(self, vocab: Vocabulary) -> None:
        self.vocab = vocab
        self._template: ChatTemplate | None = None
        if vocab.template is not None:
            self._template = ChatTemplate(vocab.template, vocab.template_tokens)

    def handle(self, call: Call) -> Tokenized:
        try:
            return self._answer(call)
        except ChatError as error:
            info = error.info
        except UnicodeEncodeError:
            param = "messages" if isinstance(call, TokenizeChat) else "prompt"
            info = _refusal("the text holds lone surrogates, which are not characters", param)
        except Exception as error:  # one call must not end the process
            log.exception("call %d failed", call.call)
            info = ErrorInfo(status=500, message=f"tokenizing failed: {error}")
        return Tokenized(call=call.call, error=info)

    def _answer(self, call: Call) -> Tokenized:
        match call:
            case TokenizeText():
                prompts = [self.vocab.encode(t, call.add_special_tokens) for t in call.texts]
            case TokenizeChat():
                prompts = [self.vocab.encode(self._render(call), add_special_tokens=False)]
            case DetokenizeIds():
                return self._detokenize(call)
        return Tokenized(
            call=call.call,
            prompts=[ids_to_bytes(prompt) for prompt in prompts],
            strings=[self._strings(p) for p in prompts] if call.want_strings else None,
            eos_ids=self.vocab.eos_ids,
        )

    def _render(self, call: TokenizeChat) -> str:
        if self._template is None:
            raise ChatError(
                "this model has no chat template: use completions, or start with --chat-template"
            )
        return self._template.render(
            call.messages,
            call.tools,
            call.add_generation_prompt,
            call.continue_final_message,
            call.template_kwargs,
        )

    def _detokenize(self, call: DetokenizeIds) -> Tokenized:
        ids = bytes_to_ids(call.ids).tolist()
        outside = [i for i in ids if not 0 <= i < self.vocab.size]
        if outside:
            info = _refusal(
                f"token ids must be below {self.vocab.size}, got {outside[0]}", "tokens"
            )
            return Tokenized(call=call.call, error=info)
        return Tokenized(call=call.call, text=self.vocab.decode(ids, call.skip_special_tokens))

    def _strings(self, ids: list[int]) -> list[str]:
        return [self.vocab.token_bytes[i].decode("utf-8", errors="replace") for i in ids]


def _refusal(message: str, param: str) -> ErrorInfo:
    return ErrorInfo(status=400, message=message, param=param, code="invalid_value")


def main(config: EngineConfig, index: int) -> None:
    """Run until killed."""
    context = zmq.Context()
    endpoints = Endpoints(config.run_dir)
    reporter = StatusReporter(context, config.run_dir, f"tokenizer-{index}")
    reporter.starting("reading the vocabulary")
    service = TokenizerService(vocabulary.load(config))
    inbox = Receiver.bind(context, endpoints.tokenizer(index))
    servers = [Sender(context, endpoints.server(i)) for i in range(config.servers)]
    reporter.ready()
    while True:
        for call in inbox.receive():
            if isinstance(call, TokenizeText | TokenizeChat | DetokenizeIds):
                servers[call.worker].send(service.handle(call))
            else:
                raise TypeError(f"not for a tokenizer: {type(call).__name__}")
