import pytest

from megalight.cli.config_args import ConfigArgs
from megalight.cli.explain import explain

OPTIONS = ("trainer", "trainer.max_steps", "trainer.strategy", "model", "data", "ckpt_path")
UNION = (
    'Parser key "trainer.strategy":\n  Does not validate against any of the Union subtypes\n'
    "  Subtypes: [<class 'lightning.pytorch.strategies.strategy.Strategy'>, <class 'str'>]\n  Errors:\n"
)


def given(*words: str) -> ConfigArgs:
    return ConfigArgs.read(["--model=tests.cli.samples.SampleModule", *words])


def test_a_value_that_begins_with_a_dot_is_no_class():
    assert "decay = '.2' is not valid" in explain(
        "Parser key \"model.decay\": Expected a <class 'int'>. Got value: .2", given("--model.decay=.2"), OPTIONS
    )


@pytest.mark.parametrize(
    ("message", "words", "parts"),
    [
        (
            "Option 'tensor_paralel' is not accepted",
            ["--trainer.strategy=tests.cli.samples.SampleStrategy", "--trainer.strategy.tensor_paralel=2"],
            ["unknown key 'trainer.strategy.tensor_paralel' (value '2')", "SampleStrategy", "'tensor_parallel'"],
        ),
        (
            "unrecognized arguments: --config.size.hiden_size=3",
            ["--model.config.size.hiden_size=3"],
            ["unknown key 'model.config.size.hiden_size' (value '3')", "SampleSize", "'hidden_size'"],
        ),
        (
            "Subcommand 'fit' does not accept option 'trainer.max_stepz'",
            ["--trainer.max_stepz=3"],
            ["unknown key 'trainer.max_stepz' (value '3')", "'max_steps'"],
        ),
        (
            "Subcommand 'fit' does not accept option 'modle.init_args.config.activation'",
            ["--modle.config.activation=x"],
            ["unknown key 'modle'", "Did you mean 'model'?"],
        ),
        (
            "the following arguments are required: trainer.logger.save_dir",
            [],
            ["name the logger: --trainer.logger=csv"],
        ),
        ("unrecognized arguments: ship.yaml", [], ["'ship.yaml'. A configuration file comes after -c: -c ship.yaml"]),
        ("unrecognized arguments: --max_steps=3", ["--max_steps=3"], ["'max_steps'", "'trainer.max_steps'"]),
        (
            "Parser key \"config.size.hidden_size\":\n  Expected a <class 'int'>. Got value: x",
            ["--model.config.size.hidden_size=x"],
            ["model.config.size.hidden_size = 'x'", "expected: int"],
        ),
        (
            UNION + "    - Expected a dot import path string: SampleStrateg\n    - Expected a <class 'str'>",
            ["--trainer.strategy=SampleStrateg"],
            ["trainer.strategy = 'SampleStrateg' names no known class", "'SampleStrategy'"],
        ),
        (
            UNION + "    - Problem with given class_path 'm.MSx':\n        module 'm' has no attribute 'MSx'\n",
            ["--trainer.strategy=m.MSx"],
            ["trainer.strategy = 'm.MSx'", "has no attribute 'MSx'"],
        ),
        (
            'Parser key "model":\n  Errors:\n    - Not a valid subclass of LightningModule\n      Subclass types '
            "expect one of:\n      - a class path (str)\n      - a dict with class_path entry\n  Given value: {}",
            [],
            ["model = 'tests.cli.samples.SampleModule' is not valid; expected: class_path, which names a subclass of "],
        ),
        (
            UNION + "    - Import path does not correspond to a subclass of Strategy\n    - Expected a <class 'bool'>",
            ["--trainer.strategy=torch.optim.SGD"],
            ["trainer.strategy = 'torch.optim.SGD' is not valid; expected: a subclass of Strategy, or bool."],
        ),
        (
            "does not accept option 'init_args.config.size'",
            [],
            ["init_args stands at the top level of the file. Indent"],
        ),
        ("the following arguments are required: config", [], ["missing: model.config."]),
        ("the following arguments are required: fit.model", [], ["missing: model."]),
        (
            'Parser key "trainer.precision":\n  Does not validate against any of the Union subtypes\n  Errors:\n'
            "    - Expected a <class 'int'>\n    - Expected a typing.Literal['16-true', 'bf16-true']\n"
            "    - Expected a <class 'NoneType'>\n  Given value: bf16-tru",
            ["--trainer.precision=bf16-tru"],
            ["trainer.precision = 'bf16-tru'", "expected: int, or one of 16-true, bf16-true.", "mean 'bf16-true'?"],
        ),
        (
            "unrecognized arguments: --trainer.callbacks.patienc=3",
            ["--trainer.callbacks.0=EarlyStopping", "--trainer.callbacks.patienc=3"],
            [
                "'trainer.callbacks.patienc' (value '3'): EarlyStopping, the last of trainer.callbacks, has",
                "'patience'",
            ],
        ),
        (
            "Option 'decay' is not accepted",
            ["--many.0=EMA", "--many.0.decay=0.5", "--many.1=EarlyStopping", "--many.decay=0.9"],
            ["unknown key 'many.decay' (value '0.9'): EarlyStopping, the last of many, has no such argument"],
        ),
    ],
)
def test_messages_name_key_value_rule_and_remedy(message, words, parts):
    text = explain(message, given(*words), OPTIONS)
    for part in parts:
        assert part in text, text
    assert len(text) < 700
    assert "<class" not in text


@pytest.mark.parametrize(
    "reason", ["Expected a dot import path string: Muon", "Subclasses are disabled for AdamConfig, thus 'Muon' is not"]
)
def test_settings_are_no_class(reason):
    """jsonargparse answers with a call of its own that accepts subclasses."""
    union = "Subtypes: [<class 'megalight.optim.config.AdamConfig'>, <class 'NoneType'>]"
    message = f'Parser key "optimizer":\n  {union}\n  Errors:\n    - {reason}\n  Given value: Muon'
    text = explain(message, given("--model.optimizer=Muon"), OPTIONS)
    assert text.startswith(
        "model.optimizer = 'Muon' is not valid; expected: the arguments of AdamConfig, no name and no"
    )
    assert "They are lr, betas, " in text
    assert "--model.optimizer.lr=VALUE. Muon is one of them: --model.optimizer.muon.lr=VALUE. For another " in text


def test_classes_are_listed_if_none_is_spelled_alike():
    message = UNION.replace("lightning.pytorch.strategies.strategy.Strategy", "megalight.optim.LRSchedule")
    text = explain(f"{message}    - Expected a dot import path string: Foo", given("--trainer.strategy=Foo"), OPTIONS)
    assert "'Foo' names no known class. Known: Constant, CosineDecay, InverseSqrtDecay, LinearDecay, WSD" in text
