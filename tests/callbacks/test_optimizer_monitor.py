"""The learning rate and the gradient norm of each logged step, also without clipping."""

import pytest
import torch

from megalight.callbacks import OptimizerMonitor
from megalight.strategies import MegatronStrategy
from tests.callbacks.test_throughput import Rows
from tests.callbacks.tiny import Tiny, tiny_trainer


class Scheduled(Tiny):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_before_optimizer_step(self, optimizer):
        self.norms = {**getattr(self, "norms", {}), self.global_step: self.gradient()}

    def gradient(self):
        """The norm, from a pass of its own."""
        weight = self.table.weight.detach().clone().requires_grad_()
        batch = self.batch
        loss = torch.nn.functional.cross_entropy(
            torch.nn.functional.embedding(batch.tokens, weight).flatten(0, 1), batch.labels.flatten()
        )
        return torch.autograd.grad(loss, weight)[0].norm().item()

    def training_step(self, batch, batch_idx):
        self.batch = batch
        return super().training_step(batch, batch_idx)


class Logging(Scheduled):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss, batch_size=1)
        return loss


def logged(name, logger):
    return {step: row[name] for step, row in logger.rows if name in row}


@pytest.mark.parametrize("clip", [None, 1e-3])
@pytest.mark.parametrize("strategy", [None, MegatronStrategy])
def test_values_of_the_logged_steps(strategy, clip):
    logger, module = Rows(), Scheduled()
    options = {"strategy": strategy()} if strategy else {}
    tiny_trainer(callbacks=[OptimizerMonitor()], logger=logger, gradient_clip_val=clip, **options).fit(module)
    assert logged("lr", logger) == {step: pytest.approx(0.1 * 0.5**step) for step in (3, 7, 11)}
    assert logged("grad_norm", logger) == {step: pytest.approx(module.norms[step], rel=1e-5) for step in (3, 7, 11)}


def test_a_rate_on_the_device_is_logged_too():
    class Recorded(Tiny):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=torch.tensor(0.25))

    logger = Rows()
    tiny_trainer(callbacks=[OptimizerMonitor()], logger=logger).fit(Recorded())
    assert logged("lr", logger) == {3: 0.25, 7: 0.25, 11: 0.25}


@pytest.mark.parametrize("clip", [None, 1e-3])
@pytest.mark.parametrize("strategy", [None, MegatronStrategy])
def test_the_last_step_is_logged(strategy, clip):
    logger, module = Rows(), Logging()
    options = {"strategy": strategy()} if strategy else {}
    runner = tiny_trainer(
        callbacks=[OptimizerMonitor()], logger=logger, max_steps=10, gradient_clip_val=clip, **options
    )
    runner.fit(module)
    assert logged("lr", logger) == {step: pytest.approx(0.1 * 0.5**step) for step in (3, 7, 9)}
    losses = logged("train_loss", logger)
    assert list(losses) == [3, 7, 9]
    assert losses[9] == float(runner.callback_metrics["train_loss"])
    if strategy and clip:
        assert logged("grad_norm", logger)[9] == pytest.approx(module.norms[9], rel=1e-5)
