"""A model of ``transformers`` as the referee of one of ours with the same weights."""

from __future__ import annotations

from typing import Any

import torch

from megalight.models.vlm import VLM
from megalight.models.vlm.hugging_face import weight_map
from megalight.models.vlm.module import VLMModule
from megalight.models.vlm.task import pack_images
from tests.support.reference_gpt import canonical_gradients, relative_error


def check_outputs_and_gradients(
    reference: Any, model: VLM, asked: dict[str, Any], batch: Any, image: int, *, token_multiple: int = 1
) -> None:
    """Logits, loss and gradients equal the referee's.

    Args:
        asked: the referee's arguments. Its labels are the tokens, but for images.
        batch: the same rows as ours.
        image: the token of images.
        token_multiple: of the rows of a micro-batch; 4 as under sequence parallelism.
    """
    tokens = asked["input_ids"]
    exact = 2e-6 if next(model.parameters()).dtype == torch.float64 else 2e-5
    expected = reference(**asked, labels=tokens.masked_fill(tokens == image, -100))
    module = VLMModule(model.config)
    packed_images = pack_images(model.config, batch.images, batch.source.flatten(), 1)
    logits = model(tokens.flatten(), batch.sequences, packed_images=packed_images).logits
    assert relative_error(logits.view_as(expected.logits), expected.logits) < exact
    module.token_multiple = token_multiple
    loss = module.loss_step(module.forward_step(model, batch), batch).sum / module.loss_tokens(batch)
    assert relative_error(loss, expected.loss) < exact
    loss.backward()
    expected.loss.backward()
    found = canonical_gradients(model)
    used = {key: p.grad for key, p in reference.named_parameters() if p.grad is not None}
    wanted = weight_map(model.config).read(used)
    assert wanted.keys() == found.keys()
    for key, gradient in found.items():
        if not key.endswith("k.bias"):  # which softmax does not feel: rounding noise around 0
            assert relative_error(gradient, wanted[key]) < 10 * exact, key
