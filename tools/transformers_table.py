"""Try every family of ``transformers`` in every layout, against the plain model in float64, and write a table.

    python tools/transformers_table.py                      # all that have no result yet, then the table
    python tools/transformers_table.py --layouts tp2 --families llama qwen3
    python tools/transformers_table.py --write              # only the table, from the results so far

Models are tiny. Two steps of SGD run as a user would run them, in processes on this machine; changes of all weights,
thus gradients, and losses are compared. Results are added to a file, so that the table can be made in parts.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
RESULTS = ROOT / "benchmarks" / "results" / "transformers.json"
PAGE = ROOT / "docs" / "transformers-table.md"
FULL = "optim_grads_params"
LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "tp2": ("TP2", 2, {"tensor_parallel": 2}),
    "tp2sp": ("TP2 + SP", 2, {"tensor_parallel": 2, "sequence_parallel": True}),
    "full": ("full sharding", 2, {"level": FULL}),
    "pp2": ("PP2", 2, {"pipeline_parallel": 2, "micro_batch_size": 1}),
    "tp2pp2": ("TP2 × PP2", 4, {"tensor_parallel": 2, "pipeline_parallel": 2, "micro_batch_size": 1}),
    "cp2": ("CP2", 2, {"context_parallel": 2}),
    "ep2": ("EP2", 2, {"expert_parallel": 2}),
    "tp2ep2": ("TP2 with EP2", 2, {"tensor_parallel": 2, "expert_parallel": 2}),
}
"""Name of a layout -> its column, number of ranks, and the strategy's arguments."""
TOLERANCE = 1e-9
ABSENT = {"no experts": "there are none", "no stages": "is a plain LightningModule, and pp=2"}
"""Word for what a family lacks -> a part of the message. These do not count."""
NEEDS = {
    "gemma3n": "the package `timm`, for its tower; its language model is `gemma3n_text`",
    "gemma4_assistant": "keys and values of the model for which it drafts",
    "gemma4_unified_assistant": "keys and values of the model for which it drafts",
    "git": "an image: its loss is of the tokens behind it",
    "musicgen": "ids and labels of several codebooks",
    "musicgen_melody": "ids and labels of several codebooks",
    "voxtral_realtime": "sound, which is added to each token",
}
"""Family that computes no loss from ids alone -> what it needs."""


def tried(family: str, layouts: list[str]) -> dict[str, list[str]]:
    """Return for each layout ``ok``, or a word that says what is wrong, and the message: on each rank."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    from megalight.errors import MegalightError
    from megalight.parallel.data_parallel.options import DataParallelOptions
    from tests.parallel.tiny_transformers import trained

    found = {}
    for layout in layouts:
        options = dict(LAYOUTS[layout][2])
        if "level" in options:
            options["data_parallel"] = DataParallelOptions(level=options.pop("level"))
        try:
            errors = trained(family, options)
        except MegalightError as error:
            word = next((word for word, part in ABSENT.items() if part in str(error)), "refused")
            found[layout] = [word, str(error)]
        except Exception as error:
            found[layout] = ["fails", f"{type(error).__name__}: {error}"]
        else:
            worst = max(errors, key=lambda name: errors[name] if errors[name] == errors[name] else float("inf"))
            right = all(error <= TOLERANCE for error in errors.values())
            found[layout] = ["ok", ""] if right else ["differs", f"{worst}: {errors[worst]:.1e}"]
    logging.disable(logging.NOTSET)
    return found


def built(family: str) -> list[str]:
    """Return ``ok`` if a tiny model of a family computes a loss, or what is in the way."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    import torch

    from tests.parallel.tiny_transformers import loss_of, tiny

    try:
        model = tiny(family)
        loss_of(model, torch.randint(3, 96, (2, 8))).backward()
    except Exception as error:
        return ["not built", f"{type(error).__name__}: {error}"]
    finally:
        logging.disable(logging.NOTSET)
    return ["ok", "declared" if getattr(model, "_tp_plan", None) else ""]


def attempt(family: str, layouts: list[str]) -> dict[str, list[str]]:
    """Try the layouts in one job, or one by one if that does not end."""
    from tests.support.workers import run

    ranks = LAYOUTS[layouts[0]][1]
    if others := [each for each in layouts if LAYOUTS[each][1] != ranks]:
        return attempt(family, [each for each in layouts if each not in others]) | attempt(family, others)
    try:
        first, *others = run(tried, ranks, family, layouts, timeout=100 * len(layouts))
    except Exception as error:
        if len(layouts) == 1:
            return {layouts[0]: ["fails", " ".join(str(error).split())[-200:]]}
        return {each: attempt(family, [each])[each] for each in layouts}
    # A rank whose result is not right speaks for all.
    return {each: next((o[each] for o in others if o[each][0] != "ok"), first[each]) for each in layouts}


def collect(families: list[str], layouts: list[str], path: Path) -> None:
    """Try what has no result yet, and save after each family."""
    from tests.support.workers import run

    results: dict[str, dict[str, list[str]]] = json.loads(path.read_text()) if path.exists() else {}
    for family in families:
        known = results.setdefault(family, {})
        try:
            if "built" not in known:
                known["built"] = run(built, 1, family, timeout=60)[0]
            missing = [each for each in layouts if each not in known]
            if known["built"][0] == "ok" and missing:
                known |= attempt(family, missing)
        except Exception as error:
            known["built"] = ["not built", " ".join(str(error).split())[-200:]]
        for value in known.values():
            value[1] = value[1].splitlines()[0][:240] if value[1] else ""
        print(family, {name: value[0] for name, value in known.items()}, flush=True)
        path.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")


def page(results: dict[str, dict[str, list[str]]]) -> str:
    """Return the page of documentation."""
    import transformers

    tested = {name: found for name, found in results.items() if found["built"][0] == "ok"}
    columns = [name for name in LAYOUTS if any(name in found for found in tested.values())]
    lines = [
        "# Families of transformers",
        "",
        "A plain LightningModule around a tiny model of each family, trained two steps: changes of all weights,",
        f"thus gradients, and losses equal the plain model's to {TOLERANCE:g} in float64 where it says ok. Made by",
        f"`python tools/transformers_table.py` with `transformers` {transformers.__version__}. `make test-full`",
        "trains each pair that says ok again.",
        "",
        "| word | meaning |",
        "| --- | --- |",
        "| ok | equal |",
        "| no experts | of the stacked form that `transformers` divides |",
        "| no stages | it declares none |",
        "| refused | an error says why, before the first step or in it; the reasons are below |",
        "| differs | trains, and numbers differ |",
        "| fails | an error of another kind |",
        "",
        "| of " + str(len(tested)) + " families | " + " | ".join(LAYOUTS[name][0] for name in columns) + " |",
        "| --- |" + " --- |" * len(columns),
    ]
    for title, chosen in {
        "that declare a plan": [found for found in tested.values() if found["built"][1] == "declared"],
        "others": [found for found in tested.values() if found["built"][1] != "declared"],
    }.items():
        counts = [Counter(found[name][0] for found in chosen if name in found) for name in columns]
        numbers = [f"{each['ok']} of {each.total() - sum(each[word] for word in ABSENT)}" for each in counts]
        lines.append(f"| {title} | {' | '.join(numbers)} |")
    lines += ["", "| family | plan | " + " | ".join(LAYOUTS[name][0] for name in columns) + " |"]
    lines.append("| --- | --- |" + " --- |" * len(columns))
    for family, found in sorted(tested.items()):
        words = [found.get(name, ["not run", ""])[0] for name in columns]
        lines.append(f"| `{family}` | {found['built'][1] or 'by form'} | {' | '.join(words)} |")
    lines += ["", "## Reasons", "", "| family | layout | message |", "| --- | --- | --- |"]
    for family, found in sorted(tested.items()):
        for name in columns:
            if (value := found.get(name, ["ok", ""]))[0] not in ("ok", "not run", *ABSENT):
                message = value[1].replace("|", "\\|").replace("<", "&lt;")
                lines.append(f"| `{family}` | {LAYOUTS[name][0]} | {message} |")
    lines += ["", "## Not tried", "", "What these need besides ids:", "", "| family | needs |", "| --- | --- |"]
    lines += [
        f"| `{name}` | {NEEDS.get(name) or found['built'][1]} |"
        for name, found in sorted(results.items())
        if found["built"][0] != "ok"
    ]
    lines.append("")
    return "\n".join(lines)


def main() -> None:
    """Try families, and write the page."""
    from tests.parallel.tiny_transformers import families

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="*", help="all by default")
    parser.add_argument("--layouts", nargs="*", choices=[*LAYOUTS], default=[*LAYOUTS])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--write", action="store_true", help="only write the page")
    options = parser.parse_args()
    if not options.write:
        collect(options.families or [*families()], options.layouts, options.results)
    PAGE.write_text(page(json.loads(options.results.read_text())))


if __name__ == "__main__":
    main()
