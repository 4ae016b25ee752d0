from megalight.cli.config_args import ConfigArgs


def test_words_and_files_are_read_alike(tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text(
        "model:\n  class_path: M\n  init_args:\n    config: {size: 3}\n"
        "trainer:\n  callbacks:\n    - class_path: EMA\n      init_args: {decay: 0.5}\n"
    )
    found = ConfigArgs.read(["-c", str(file), "--trainer.max_steps=3", "--data", "D", "--flag", "--data.path", "x"])
    assert found.values == {
        "model": "M",
        "model.config.size": 3,
        "trainer.callbacks.0": "EMA",
        "trainer.callbacks.0.decay": 0.5,
        "trainer.max_steps": "3",
        "data": "D",
        "flag": "",
        "data.path": "x",
    }


def test_a_broken_file_is_left_to_the_parser(tmp_path):
    (tmp_path / "torn.yaml").write_text("a: [1,\n b: :")
    assert ConfigArgs.read(["-c", str(tmp_path / "torn.yaml"), "-c", str(tmp_path / "absent.yaml")]).values == {}
