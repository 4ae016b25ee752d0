"""A base's hidden states for the samples of a run, written to disk: what its draft learns from without the base."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from megalight import checkpoint
from megalight.checkpoint.ranks import alone
from megalight.checkpoint.view import views_of_source
from megalight.data.records import check_begun
from megalight.data.states import ENDS, StatesMeta, values_of
from megalight.errors import DataError
from megalight.inference.recording import RunData, common_facts, splits_of, write_records
from megalight.models.distillation import OUTPUT, SAVED, Layout
from megalight.models.eagle import EagleConfig
from megalight.models.eagle.base import BASE, BaseModel
from megalight.models.saved import BASE as WHOLE
from megalight.models.saved import widest
from megalight.models.stored import open_model
from megalight.parallel.mesh import ParallelMesh
from megalight.types import TokenBatch


def record_states(
    base: BaseModel,
    config: EagleConfig,
    data: RunData,
    output: Path,
    *,
    device: torch.device | str = "cpu",
    dtype: str | None = None,
    micro_batch_size: int = 1,
    validation: bool = True,
    part: int = 0,
    parts: int = 1,
    progress: bool = False,
) -> StatesMeta | None:
    """Write the hidden states that a draft learns from. What is on disk already is not computed again.

    Args:
        base: the base. It is whole in this process, whatever its layout in the run.
        config: the draft, with the sizes of this base.
        data: the data of the run that will train it. Its ``trainer`` says how many samples there are.
        output: the folder to write; see :mod:`megalight.data.states`.
        device: device of the base.
        dtype: of the base and of the states on disk; None: as the base is saved.
        micro_batch_size: samples of a forward pass.
        validation: for the validation samples, too.
        part, parts: which of how many equal parts of the samples. Processes may write parts at the same time.
        progress: show a progress bar.

    Returns:
        the facts about the folder; None if parts are missing.

    Raises:
        DataError: the sequences are too long for the draft, or the folder holds something else.
    """
    if data.sequence_length > config.max_sequence_length:
        raise DataError(
            f"data.sequence_length={data.sequence_length} is longer than max_sequence_length="
            f"{config.max_sequence_length} of the draft; lower it."
        )
    splits, weights = splits_of(data, validation), open_model(base.folder).weights
    dtype = dtype or str(widest(weights)).removeprefix("torch.")
    meta = StatesMeta(
        **common_facts(data, splits), hidden_size=config.hidden_size, layers=config.auxiliary_layers, dtype=dtype
    )
    check_begun(output, meta)
    # As in a run beside the base, which is whole here, whatever its layout there.
    whole = replace(base, layout=Layout())
    declared = replace(whole.frozen(whole.task(config.auxiliary_layers), config.draft_ids), beside=None)
    run = declared.build(BASE, ParallelMesh(), getattr(torch, dtype), torch.device(device))

    def compute(batch: TokenBatch) -> dict[str, Tensor]:
        with torch.inference_mode():
            (found,) = run([batch])
        return {name: tensor.view(*batch.tokens.shape, -1) for name, tensor in found.items()}

    complete = write_records(
        output,
        meta,
        data,
        splits,
        compute,
        lambda row: values_of(row, meta.dtype),
        device=torch.device(device),
        micro_batch_size=micro_batch_size,
        part=part,
        parts=parts,
        progress=progress,
        # The first part alone: they are the same for all.
        before=lambda: None if part else save_ends(base, output),
    )
    return meta if complete else None


def save_ends(base: BaseModel, output: Path) -> None:
    """Write the base's embedding and output layer, with which its draft computes."""
    if (output / ENDS).exists():
        return
    stored = open_model(base.folder)
    names = [f"{SAVED}embed.word.weight"] + [f"{SAVED}{OUTPUT}.weight"] * (not stored.config.tie_embeddings)
    described = {"family": stored.family.name, "config": stored.config.to_dict(), "transforms": [], WHOLE: True}
    with alone() as group:
        checkpoint.save(
            output / ENDS,
            views_of_source(stored.weights, names, None, group),
            common={"model": described},
            files=dict(stored.files),
            process_group=group,
        )
