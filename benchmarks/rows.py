"""The rows of the table: named steps with their requirements, peers and aims."""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.step import Step


@dataclass(frozen=True)
class Row:
    """One row.

    Attributes:
        about: description in one line.
        step: the step to run.
        gpus: number of processes, one per GPU (on CPU, only processes).
        aim: TFLOP/s per GPU to reach.
        peers: peers that run in the same call as Megalight, if installed.
        figures: peer -> TFLOP/s per GPU, measured earlier on H200s, each in its own call.
        against: another row, and the factor of its TFLOP/s that this row should reach.
        environment: environment variables of the processes.
        like: a measured row with a layout of the same kind, by which this one is predicted (``benchmarks/eight.py``).
    """

    about: str
    step: Step
    gpus: int = 1
    aim: float | None = None
    peers: tuple[str, ...] = ()
    figures: dict[str, float] = field(default_factory=dict)
    against: tuple[str, float] | None = None
    environment: dict[str, str] = field(default_factory=dict)
    like: str = ""


LLAMA3_8B = "layers=32 vocab=128256"
WIDTH_2048 = "layers=24 hidden=2048 ffn=8192 heads=16 kv=8 mbs=4 micro=2"
FLASH = "backends=attention:flash_attn_4"
SMALL = "layers=12 hidden=768 ffn=2048 heads=12 kv=12 vocab=50304 seq=1024 mbs=1 micro=4"
TINY = (
    "device=cpu precision=fp32 layers=2 hidden=64 ffn=128 heads=4 kv=2 vocab=256 seq=64 mbs=2 micro=2 steps=3 warmup=1"
)
TINY_WIDE = f"{TINY} hidden=128 heads=2"
"""Also half as wide, its rows are as long as a block of quantized values."""
FEW = "steps=3 warmup=2"
"""Numbers of steps for rows with steps that take seconds."""
SHORT = "steps=5 warmup=3"
"""Numbers of steps for rows that share one loan of a machine; a CUDA graph is recorded in the third."""

COPIES = "sharding=gradient_dtype:bfloat16,reduce_scatter_with_fp32_accumulation:true,gathers:auto,reductions:auto"
ONE_F_ONE_B = "pp=4 mbs=1 micro=16 layout=Et*8|t*9|t*9|t*6L"
HALVES = "pp=4 mbs=1 micro=16 halves=1 layout=Et*17|t*17|t*17|t*13L"
INTERLEAVED = "pp=4 mbs=1 micro=16 layout=Et|(tt|)*11(ttt|)*3L"
LLAMA3_70B = "layers=48 hidden=8192 ffn=28672 heads=64 kv=8 vocab=128256"
"""Its width. Weights, gradients and states of all 80 layers, 18 bytes for each element, do not fit on eight GPUs."""
TP4_PP2 = "tp=4 pp=2 mbs=1 micro=16"
NORMS = "attention_norm,mlp_norm"
LONG = f"mbs=1 cp=4 recompute={NORMS},mlp.act"
LONGEST = f"mbs=1 micro=1 cp=4 seq=131072 recompute={NORMS},mlp.act,layers.*[1-46-9].mlp"
"""Every fifth layer stores the first product of its MLP. There is no memory for more."""
MOVED = f"{LONG} micro=1 seq=131072 offload=mlp level=optim_grads"
"""As many tokens, but nothing of the MLPs is computed again but their activation functions."""
HALF_OF_IT = f"mbs=1 micro=1 cp=2 seq=65536 recompute={NORMS},mlp"
"""As many tokens on a rank as above, on two."""
MIXTRAL = "layers=4 experts=8 topk=2"
QWEN3_MOE = "hidden=2048 ffn=768 heads=32 kv=4 dim=128 experts=128 topk=8 vocab=151936"
ADAPTERS = "mbs=1 micro=4 steps=6 warmup=3 rank=16"
NO_GAPS = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
"""These rows need nearly all memory for blocks of many sizes, so fragmentation would leave too little."""
PINNED = {
    "PYTORCH_CUDA_ALLOC_CONF": f"{NO_GAPS['PYTORCH_CUDA_ALLOC_CONF']},"
    "pinned_use_cuda_host_register:True,pinned_num_register_threads:8"
}
"""These rows pin much host memory in their first step. Several threads do it sooner."""


def _row(about: str, text: str, **more: object) -> Row:
    return Row(about, Step().but(text), **more)  # type: ignore[arg-type]


ROWS: dict[str, Row] = {
    "8b-16l-bf16": _row(
        "width of an 8B model, 16 layers, 4096 tokens, bf16",
        "",
        aim=595,
        peers=("hf-compile", "mcore-te"),
        figures={"mcore-te": 569, "hf-compile": 541},
    ),
    "8b-16l-te": _row(
        "the same with TransformerEngine's kernels",
        "backends=attention:transformer_engine,norm:transformer_engine,activation:transformer_engine,"
        "weight_gradient:transformer_engine,adam:transformer_engine",
    ),
    "8b-16l-fp8": _row(
        "the first row in FP8", "precision=fp8", aim=890, peers=("mcore-te",), figures={"mcore-te": 800}
    ),
    "8b-16l-fp8-delayed": _row(
        "the same with scales of past steps",
        "precision=fp8 recipe=delayed",
        aim=890,
        peers=("mcore-te",),
        figures={"mcore-te": 778},
    ),
    "8b-16l-bf16-flash": _row(
        "the first row with flash-attn 4", FLASH, aim=595, peers=("mcore-te",), figures={"mcore-te": 545}
    ),
    "8b-16l-fp8-delayed-flash": _row(
        "the same in FP8 with scales of past steps",
        f"precision=fp8 recipe=delayed {FLASH}",
        aim=890,
        peers=("mcore-te",),
        figures={"mcore-te": 778},
    ),
    "8b-8l-8k-bf16": _row(
        "8 layers of that, 8192 tokens, bf16",
        "layers=8 seq=8192 mbs=1",
        aim=575,
        peers=("hf-compile", "mcore-te"),
        figures={"mcore-te": 555, "hf-compile": 532},
    ),
    "8b-8l-8k-fp8": _row(
        "the same in FP8",
        "layers=8 seq=8192 mbs=1 precision=fp8",
        aim=830,
        peers=("mcore-te",),
        figures={"mcore-te": 753},
    ),
    "8b-8l-8k-fp8-delayed": _row(
        "the same with scales of past steps",
        "layers=8 seq=8192 mbs=1 precision=fp8 recipe=delayed",
        aim=830,
        peers=("mcore-te",),
    ),
    "8b-8l-8k-fp8-delayed-flash": _row(
        "the same with flash-attn 4",
        f"layers=8 seq=8192 mbs=1 precision=fp8 recipe=delayed {FLASH}",
        aim=830,
        peers=("mcore-te",),
    ),
    "2b-24l-flash": _row("width 2048, 24 layers, with flash-attn 4", f"{WIDTH_2048} {FLASH}", aim=575),
    "2b-24l": _row(
        "width 2048, 24 layers, bf16",
        WIDTH_2048,
        aim=575,
        peers=("hf-compile", "mcore-te"),
        figures={"mcore-te": 530, "hf-compile": 409},
    ),
    "mixtral-4l": _row(
        "Mixtral 8x7B cut to 4 layers, balanced routes",
        f"{MIXTRAL} mbs=1",
        aim=480,
        peers=("mcore-te",),
        figures={"mcore-te": 394},
    ),
    "mixtral-4l-mbs2": _row(
        "the same, micro-batches of two sequences", MIXTRAL, aim=480, peers=("mcore-te",), figures={"mcore-te": 431}
    ),
    "mixtral-4l-mbs2-fp8": _row("the same in FP8", f"{MIXTRAL} precision=fp8", against=("mixtral-4l-mbs2", 1.25)),
    "qwen3-moe-8l": _row(
        "Qwen3-30B-A3B cut to 8 layers, balanced routes",
        f"layers=8 {QWEN3_MOE}",
        aim=220,
        peers=("mcore-te",),
        figures={"mcore-te": 144},
    ),
    **{
        f"qwen3-moe-24l-ep4-{name}": _row(
            f"Qwen3-30B-A3B cut to 24 layers, EP=4, {about}",
            f"layers=24 {QWEN3_MOE} ep=4 {words}",
            gpus=4,
            aim=aim,
            peers=("mcore-te",),
            figures={"mcore-te": figure},
        )
        for name, about, words, aim, figure in (
            ("mbs2", "balanced routes", "mbs=2", 300, 217),
            ("mbs4", "balanced routes", "mbs=4", 340, 294),
            ("natural", "the router's own routes", "mbs=2 natural=1", 200, 125),
        )
    },
    "llama3-8b-lora": _row(
        "Llama-3-8B, adapters of rank 16 on all linear layers, one GPU",
        f"{LLAMA3_8B} {ADAPTERS}",
        peers=("peft", "peft-compile", "peft-compile-bf16"),
    ),
    "llama3-16l-lora": _row("16 layers of that", f"vocab=128256 {ADAPTERS}", peers=("peft", "peft-compile")),
    "llama3-8b-qlora": _row(
        "Llama-3-8B, the same adapters, frozen weights in int8", f"{LLAMA3_8B} {ADAPTERS} base=int8"
    ),
    "125m": _row("125M, micro-batches of 1024 tokens: bound by launches", SMALL, peers=("hf", "hf-compile")),
    "125m-graph": _row("the same as a CUDA graph", f"{SMALL} graph=1", against=("125m", 1.25)),
    "llama3-16l-dp2": _row("16 layers of Llama-3-8B, DP=2", "vocab=128256 mbs=1", gpus=2, peers=("fsdp2",)),
    "llama3-16l-dp2-full": _row(
        "the same, parameters and gradients sharded",
        "vocab=128256 mbs=1 level=optim_grads_params",
        gpus=2,
        peers=("fsdp2", "mfsdp"),
    ),
    "llama3-16l-dp2-full-copies": _row(
        "the same by copy engines, gradients in bfloat16 and their sums in float32",
        f"vocab=128256 mbs=1 level=optim_grads_params {COPIES}",
        gpus=2,
        against=("llama3-16l-dp2-full", 1.05),
    ),
    "8b-16l-dp2": _row("the first row on two GPUs, DP=2", "", gpus=2, against=("8b-16l-bf16", 0.96)),
    "8b-16l-tp2": _row("the first row on two GPUs, TP=2 with SP", "tp=2", gpus=2, peers=("mcore-te",)),
    **{
        f"8b-16l-tp2-{way}": _row(f"the same, collectives {way}", f"tp=2 overlap={way}", gpus=2)
        for way in ("pipelined", "symmetric")
    },
    "llama3-8b-dp4": _row(
        "Llama-3-8B, DP=4, bf16",
        f"{LLAMA3_8B} mbs=1",
        gpus=4,
        aim=580,
        peers=("fsdp2", "mcore-te"),
        figures={"mcore-te": 535, "fsdp2": 404},
    ),
    "llama3-8b-dp4-full": _row(
        "the same, parameters and gradients sharded",
        f"{LLAMA3_8B} mbs=1 level=optim_grads_params",
        gpus=4,
        aim=520,
        peers=("fsdp2", "mfsdp"),
        figures={"fsdp2": 400, "mfsdp": 422},
    ),
    "llama3-8b-dp4-fp8": _row(
        "Llama-3-8B, DP=4, in FP8",
        f"{LLAMA3_8B} mbs=1 precision=fp8",
        gpus=4,
        aim=840,
        peers=("mcore-te",),
        figures={"mcore-te": 729},
    ),
    **{
        f"llama3-8b-dp4{name}-graph": _row(
            f"Llama-3-8B, DP=4, {about}, steps as CUDA graphs",
            f"{LLAMA3_8B} mbs=1 graph=1 precision={precision}",
            gpus=4,
            aim=aim,
        )
        for name, about, precision, aim in (("", "bf16", "bf16", 580), ("-fp8", "in FP8", "fp8", 840))
    },
    **{
        f"llama3-8b-{name}-graph-copies": _row(
            f"{about}, steps as CUDA graphs, parameters gathered by copy engines",
            f"{LLAMA3_8B} mbs=1 graph=1 sharding=gathers:auto {layout}",
            gpus=4,
            aim=aim,
            peers=("mcore-te",),
        )
        for name, about, layout, aim in (
            ("dp4", "Llama-3-8B, DP=4", "", 580),
            (
                "dp4-fp8-delayed",
                "Llama-3-8B, DP=4, in FP8 with scales of past steps",
                "precision=fp8 recipe=delayed",
                840,
            ),
            ("tp2dp2", "Llama-3-8B, TP=2 with SP, DP=2", "tp=2", 530),
        )
    },
    **{
        f"llama3-8b-{name}-graph-copies-mbs2": _row(
            f"{about}, the same in two micro-batches of two sequences",
            f"{LLAMA3_8B} mbs=2 micro=2 graph=1 sharding=gathers:auto {layout}",
            gpus=4,
            aim=aim,
            peers=("mcore-te",),
        )
        for name, about, layout, aim in (
            ("dp4", "Llama-3-8B, DP=4", "", 580),
            ("tp2dp2", "Llama-3-8B, TP=2 with SP, DP=2", "tp=2", 530),
        )
    },
    "llama3-8b-tp4": _row(
        "Llama-3-8B, TP=4 with SP", f"{LLAMA3_8B} tp=4", gpus=4, aim=510, peers=("mcore-te",), figures={"mcore-te": 428}
    ),
    "llama3-8b-tp2dp2": _row(
        "Llama-3-8B, TP=2 with SP, DP=2",
        f"{LLAMA3_8B} tp=2 mbs=1",
        gpus=4,
        aim=530,
        peers=("mcore-te",),
        figures={"mcore-te": 456},
    ),
    **{
        f"llama3-8b-{name}-{way}": _row(
            f"{about}, collectives {way}", f"{LLAMA3_8B} {layout} overlap={way}", gpus=4, aim=aim
        )
        for name, about, layout, aim in (
            ("tp4", "Llama-3-8B, TP=4 with SP", "tp=4", 510),
            ("tp2dp2", "Llama-3-8B, TP=2 with SP, DP=2", "tp=2 mbs=1", 530),
        )
        for way in ("pipelined", "symmetric")
    },
    **{
        f"llama3-8b-{name}-graph{suffix}": _row(
            f"{about}, steps as CUDA graphs{more}", f"{LLAMA3_8B} {layout} graph=1 overlap={way}", gpus=4, aim=aim
        )
        for name, about, layout, aim in (
            ("tp4", "Llama-3-8B, TP=4 with SP", "tp=4", 510),
            ("tp2dp2", "Llama-3-8B, TP=2 with SP, DP=2", "tp=2 mbs=1", 530),
        )
        for way, suffix, more in (("auto", "", ""), ("plain", "-plain", ", plain collectives"))
    },
    **{
        f"llama3-8b-{name}-graph-flash": _row(
            f"{about}, steps as CUDA graphs, with flash-attn 4",
            f"{LLAMA3_8B} {layout} graph=1 {FLASH}",
            gpus=4,
            aim=aim,
            peers=("mcore-te",),
        )
        for name, about, layout, aim in (
            ("dp4", "Llama-3-8B, DP=4", "mbs=1", 580),
            (
                "dp4-fp8-delayed",
                "Llama-3-8B, DP=4, in FP8 with scales of past steps",
                "mbs=1 precision=fp8 recipe=delayed",
                840,
            ),
            ("tp4", "Llama-3-8B, TP=4 with SP", "tp=4", 510),
            ("tp2dp2", "Llama-3-8B, TP=2 with SP, DP=2", "tp=2 mbs=1", 530),
        )
    },
    "llama3-8b-pp4": _row(
        "Llama-3-8B, PP=4, 1F1B", f"{LLAMA3_8B} {FEW} {ONE_F_ONE_B}", gpus=4, aim=490, peers=("mcore-te",)
    ),
    "llama3-8b-pp4-halves": _row(
        "the same, stages of 8.5, 8.5, 8.5 and 6.5 layers",
        f"{LLAMA3_8B} {FEW} {HALVES}",
        gpus=4,
        aim=490,
    ),
    "llama3-8b-pp4-zb": _row("the same, zero bubble", f"{LLAMA3_8B} {FEW} {ONE_F_ONE_B} schedule=zero_bubble", gpus=4),
    "llama3-8b-pp4-vpp4": _row(
        "Llama-3-8B, PP=4, VPP=4, interleaved",
        f"{LLAMA3_8B} {FEW} {INTERLEAVED}",
        gpus=4,
        aim=520,
        peers=("mcore-te",),
    ),
    "llama3-8b-pp4-vpp4-zb": _row(
        "the same, zero bubble",
        f"{LLAMA3_8B} {FEW} {INTERLEAVED} schedule=zero_bubble",
        gpus=4,
        aim=535,
    ),
    **{
        f"llama3-8b-pp4{name}-flash": _row(
            f"Llama-3-8B, PP=4, {about}, with flash-attn 4", f"{LLAMA3_8B} {FEW} {layout} {FLASH}", gpus=4, aim=aim
        )
        for name, about, layout, aim in (
            ("", "1F1B", ONE_F_ONE_B, 490),
            ("-vpp4", "VPP=4, interleaved", INTERLEAVED, 520),
            ("-vpp4-zb", "VPP=4, zero bubble", f"{INTERLEAVED} schedule=zero_bubble", 535),
        )
    },
    "llama3-8b-tp2pp2": _row(
        "Llama-3-8B, TP=2 with SP, PP=2, 1F1B", f"{LLAMA3_8B} {FEW} micro=8 tp=2 pp=2 layout=Et*17|t*15L", gpus=4
    ),
    **{
        f"llama3-8b-cp4-32k-{kind.replace('_', '-')}": _row(
            f"Llama-3-8B, CP=4, 32,768 tokens, {kind.replace('_', ' ')}",
            f"{LLAMA3_8B} {FEW} {LONG} seq=32768 kind={kind}",
            gpus=4,
            peers=("mcore-te",),
        )
        for kind in ("ring", "all_gather", "all_to_all")
    },
    **{
        f"llama3-8b-cp4-128k-{kind.replace('_', '-')}": _row(
            f"Llama-3-8B, CP=4, 131,072 tokens, {kind.replace('_', ' ')}",
            f"{LLAMA3_8B} {FEW} {LONGEST} kind={kind}",
            gpus=4,
            aim=490,
            peers=("mcore-te",),
            environment=NO_GAPS,
        )
        for kind in ("ring", "all_gather", "all_to_all")
    },
    "llama3-8b-cp4-128k-all-gather-offload": _row(
        "Llama-3-8B, CP=4, 131,072 tokens, all gather, MLPs kept in host memory, gradients sharded",
        f"{LLAMA3_8B} {FEW} {MOVED} kind=all_gather",
        gpus=4,
        aim=490,
        environment=PINNED,
    ),
    "llama3-8b-cp4-128k-all-gather-fp8": _row(
        "the same in FP8 with scales of past steps",
        f"{LLAMA3_8B} {FEW} {MOVED} kind=all_gather precision=fp8 recipe=delayed",
        gpus=4,
        environment=PINNED,
    ),
    "llama3-8b-cp4-128k-all-gather-flash": _row(
        "Llama-3-8B, CP=4, 131,072 tokens, all gather, with flash-attn 4",
        f"{LLAMA3_8B} {FEW} {LONGEST} kind=all_gather {FLASH}",
        gpus=4,
        aim=490,
        environment=NO_GAPS,
    ),
    "llama3-8b-cp4-128k-all-gather-flash-grads": _row(
        "the same, gradients sharded",
        f"{LLAMA3_8B} {FEW} {LONGEST} kind=all_gather {FLASH} level=optim_grads",
        gpus=4,
        aim=490,
        environment=NO_GAPS,
    ),
    "llama3-8b-cp4-256k-all-gather-flash-grads": _row(
        "the same, 262,144 tokens, all MLPs recomputed",
        f"{LLAMA3_8B} {FEW} {LONGEST} seq=262144 recompute={NORMS},mlp kind=all_gather {FLASH} level=optim_grads",
        gpus=4,
        aim=480,
        environment=NO_GAPS,
    ),
    **{
        f"llama3-8l-cp2-64k-{kind.replace('_', '-')}{suffix}": _row(
            f"8 layers of Llama-3-8B, CP=2, 65,536 tokens, {kind.replace('_', ' ')}{more}",
            f"layers=8 vocab=128256 {FEW} {HALF_OF_IT} kind={kind} {backend}",
            gpus=2,
            environment=NO_GAPS,
        )
        for suffix, more, backend in (("", "", ""), ("-flash", ", with flash-attn 4", FLASH))
        for kind in ("ring", "all_gather")
    },
    "llama3-8b-dp8": _row(
        "Llama-3-8B, DP=8, bf16",
        f"{LLAMA3_8B} {SHORT} mbs=1",
        gpus=8,
        peers=("mcore-te",),
        like="llama3-8b-dp4",
    ),
    "llama3-8b-dp8-full": _row(
        "the same, parameters and gradients sharded",
        f"{LLAMA3_8B} {SHORT} mbs=1 level=optim_grads_params",
        gpus=8,
        peers=("fsdp2",),
        like="llama3-8b-dp4-full",
    ),
    "llama3-8b-tp2dp4": _row(
        "Llama-3-8B, TP=2 with SP, DP=4, steps as CUDA graphs, parameters gathered by copy engines",
        f"{LLAMA3_8B} {SHORT} tp=2 mbs=1 graph=1 sharding=gathers:auto",
        gpus=8,
        peers=("mcore-te",),
        like="llama3-8b-tp2dp2-graph-copies",
    ),
    "llama3-8b-tp4pp2": _row(
        "Llama-3-8B, TP=4 with SP, PP=2, 1F1B",
        f"{LLAMA3_8B} {FEW} {TP4_PP2} layout=Et*17|t*15L",
        gpus=8,
        peers=("mcore-te",),
        like="llama3-8b-tp4-graph-plain",
    ),
    **{
        f"llama3-70b-48l-tp4pp2{suffix}": _row(
            f"Llama-3-70B cut to 48 layers, TP=4 with SP, PP=2, 1F1B, {about}",
            f"{LLAMA3_70B} {FEW} {TP4_PP2} layout=Et*25|t*23L {precision}",
            gpus=8,
            peers=("mcore-te",),
            environment=NO_GAPS,
            like="llama3-8b-tp2pp2",
        )
        for suffix, about, precision in (
            ("", "bf16", ""),
            ("-fp8", "FP8 with scales of past steps", "precision=fp8 recipe=delayed"),
        )
    },
    **{
        f"qwen3-30b-a3b-ep8{suffix}": _row(
            f"Qwen3-30B-A3B, EP=8, {about}, balanced routes",
            f"layers=48 {QWEN3_MOE} {FEW} ep=8 mbs=2 {precision}",
            gpus=8,
            peers=("mcore-te",),
            environment=NO_GAPS,
            like="qwen3-moe-24l-ep4-mbs2",
        )
        for suffix, about, precision in (("", "bf16", ""), ("-fp8", "FP8", "precision=fp8"))
    },
    "llama3-8b-cp8-256k": _row(
        "Llama-3-8B, CP=8, 262,144 tokens, all gather, gradients sharded",
        f"{LLAMA3_8B} {LONGEST} cp=8 seq=262144 kind=all_gather level=optim_grads steps=2 warmup=1",
        gpus=8,
        peers=("mcore-te",),
        environment=NO_GAPS,
        like="llama3-8b-cp4-128k-all-gather",
    ),
    "llama3-8b-tp4pp2-graph": _row(
        "Llama-3-8B, TP=4 with SP, PP=2, 1F1B, steps as CUDA graphs",
        f"{LLAMA3_8B} {SHORT} {TP4_PP2} layout=Et*17|t*15L graph=1",
        gpus=8,
        like="llama3-8b-tp4-graph",
    ),
    "tiny-cpu": _row("a tiny model on the CPU, to try the command", TINY, peers=("hf", "mcore-te")),
    "tiny-cpu-dp2": _row("the same, DP=2: two processes", TINY, gpus=2, peers=("fsdp2",)),
    "tiny-cpu-dp2-full": _row("the same, fully sharded", f"{TINY} level=optim_grads_params", gpus=2),
    "tiny-cpu-lora": _row("the tiny model, adapters alone", f"{TINY_WIDE} rank=4", peers=("peft",)),
    "tiny-cpu-qlora": _row("the same, frozen weights in int8", f"{TINY_WIDE} rank=4 base=int8"),
    "tiny-moe-cpu-ep2": _row("tiny experts, EP=2", f"{TINY} experts=4 ep=2", gpus=2),
    "tiny-cpu-tp2": _row("the tiny model, TP=2 with SP", f"{TINY} tp=2", gpus=2),
}
"""Name -> row, in the order of the table."""
