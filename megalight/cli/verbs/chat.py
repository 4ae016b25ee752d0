"""``megalight chat CKPT``: talk with a trained model in the terminal."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from megalight.cli.verbs import add_model_arguments, add_sampling_arguments, dtype_of
from megalight.errors import ConfigurationError, DataError, MegalightError, nearest

if TYPE_CHECKING:
    from megalight.checkpoint.disk.files import PathLike
    from megalight.serving import EngineOutput, ServedModel

COMMANDS = {
    "/reset": "start a new conversation, with the same system message",
    "/system": "TEXT: set the system message, and start a new conversation; without a text, there is none",
    "/save": "FILE: append the conversation to a file, as a row that megalight prepare --chat reads",
    "/help": "show these commands",
    "/quit": "end, as Ctrl-D does",
}
"""Words that begin a line which is no message -> meaning."""


DESCRIPTION = "talk with a trained model in the terminal"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "checkpoint",
        help="a checkpoint, a run's folder (its newest one), a folder of transformers, or a name: Qwen/Qwen3-0.6B",
    )
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    parser.add_argument("--chat-template", metavar="FILE", help="a Jinja file (default: the tokenizer's template)")
    parser.add_argument(
        "-n", "--max-new-tokens", type=int, help="limit of an answer's tokens (default: what the model has room for)"
    )
    add_sampling_arguments(parser)
    add_model_arguments(parser)
    parser.add_argument(
        "--tensor-parallel",
        type=int,
        default=1,
        help="processes that share each layer, each on a GPU (default: 1)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Answer message after message, until the input ends. Answers go to the output, all else to stderr."""
    from megalight.cli.checkpoints import existing

    path = existing(arguments.checkpoint)

    from megalight.data.chat.template import ChatTemplate, read_template  # after the checks: torch takes seconds
    from megalight.inference import SamplingParams
    from megalight.serving import ServedModel
    from megalight.serving.engine_loop import EngineOptions

    source = None if arguments.chat_template is None else read_template(arguments.chat_template)
    sampling = SamplingParams(temperature=arguments.temperature, top_k=arguments.top_k, top_p=arguments.top_p)
    served = ServedModel.from_checkpoint(
        path,
        tensor_parallel=arguments.tensor_parallel,
        device=arguments.device,
        options=EngineOptions(max_sequences=1),
        tokenizer=arguments.tokenizer,
        base=None if arguments.base is None else existing(arguments.base),
        dtype=dtype_of(arguments),
        keys=arguments.weights_keys,
        adapter=arguments.adapter,
    )
    served.template = ChatTemplate.of(served.words, source)
    options = {"sampling_params": sampling, "seed": arguments.seed}
    with closing(served), closing(_Conversation(served, arguments.system, arguments.max_new_tokens, options)) as talk:
        _converse(talk, path)
    return 0


def _converse(conversation: _Conversation, path: PathLike) -> None:
    if sys.stdin.isatty():
        with suppress(ImportError):  # editing and history of lines; not on every system
            import readline  # noqa: F401
        _tell(f"{path}: write a message. Ctrl-C stops an answer, Ctrl-D ends; /help shows more.")
    for line in _lines():
        try:
            if line.startswith("/"):
                if not conversation.command(line):
                    break
            elif line.strip():
                conversation.answer(line)
        except MegalightError as error:
            if conversation.failed:
                raise
            _tell(f"error: {error}")


def _lines() -> Iterator[str]:
    """Yield what the user writes, line by line. Ctrl-C drops a line."""
    prompt = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            yield input(prompt)
        except EOFError:
            return
        except KeyboardInterrupt:
            _tell("\nCtrl-D ends.")


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class _Conversation:
    """Messages, and the engine that answers them, in a thread of its own."""

    def __init__(self, served: ServedModel, system: str | None, limit: int | None, options: dict[str, Any]) -> None:
        from megalight.serving.engine_loop import EngineThread

        self.served, self.limit, self.options = served, limit, options
        self.ends = served.ends | served.template_ends
        self.failed = False
        self._numbers = itertools.count()
        self._outputs: SimpleQueue[EngineOutput | BaseException] = SimpleQueue()
        self._thread = EngineThread(served.loop, self._arrived, self._outputs.put)
        self.system = system
        self.messages: list[dict[str, str]] = []
        self.reset()

    def _arrived(self, outputs: list[EngineOutput]) -> None:
        for output in outputs:
            self._outputs.put(output)

    def close(self) -> None:
        """End the thread."""
        self._thread.close()

    def reset(self) -> None:
        """Start again."""
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def answer(self, text: str) -> None:
        """Print the answer to a message while it is written. Ctrl-C stops it, and what was written stays.

        Raises:
            MegalightError: the template refuses the messages, or they are too long; the message is dropped. Or a step
                of the engine has failed.
        """
        asked = [*self.messages, {"role": "user", "content": text}]
        prompt, parts = self.served.chat_ids(asked), list[str]()
        if len(prompt) >= self.served.max_sequence_length:
            raise DataError(
                f"the conversation has {len(prompt)} tokens, and the model reads at most "
                f"{self.served.max_sequence_length}, with the answer. Start a new one (/reset), or shorten it."
            )
        try:
            for part in self._parts(prompt):
                parts.append(part)
                print(part, end="", flush=True)
        except KeyboardInterrupt:
            _tell(" [stopped]")
        print(flush=True)
        self.messages = [*asked, {"role": "assistant", "content": "".join(parts)}]

    def _parts(self, prompt: list[int]) -> Iterator[str]:
        """Yield an answer while it is written. Whoever leaves the iteration aborts it."""
        from megalight.serving.engine_loop import Abort, EngineRequest

        room = self.served.room(prompt)
        request = EngineRequest(
            id=str(next(self._numbers)),
            prompt=prompt,
            max_new_tokens=room if self.limit is None else min(room, self.limit),
            ends=self.ends,
            **self.options,
        )
        try:
            self._thread.submit(request)
            while True:
                output = self._outputs.get()
                if isinstance(output, BaseException):
                    self.failed = True
                    raise MegalightError(f"the engine has stopped: {output}") from output
                if output.id != request.id:
                    continue  # of one that was stopped
                if output.error is not None:
                    raise output.error
                yield output.text
                if output.reason == "error":
                    raise MegalightError("the logits hold NaN or infinity; the answer ends here.")
                if output.last:
                    return
        finally:
            self._thread.submit(Abort(request.id))

    def command(self, line: str) -> bool:
        """Follow a command; return whether the conversation goes on.

        Raises:
            ConfigurationError: there is no such command, or its file cannot be written.
        """
        name, _, rest = line.strip().partition(" ")
        if name not in COMMANDS:
            raise ConfigurationError(
                f"{name} is no command.{nearest(name, COMMANDS)} /help shows them; a message does not begin with /."
            )
        if name == "/reset":
            self.reset()
        elif name == "/system":
            self.system = rest.strip() or None
            self.reset()
        elif name == "/save":
            self._save(rest.strip())
        elif name == "/help":
            _tell("\n".join(f"{word:<8} {meaning}" for word, meaning in COMMANDS.items()))
        return name != "/quit"

    def _save(self, file: str) -> None:
        if not file:
            raise ConfigurationError("/save has no file; write /save chat.jsonl.")
        try:
            with Path(file).open("a", encoding="utf-8") as lines:
                lines.write(json.dumps({"messages": self.messages}, ensure_ascii=False) + "\n")
        except OSError as error:
            raise ConfigurationError(f"{file} cannot be written ({error.strerror}); choose another file.") from error
        _tell(f"saved to {file}")
