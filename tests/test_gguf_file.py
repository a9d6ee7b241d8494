"""Files as written by the `gguf` package, files that nobody should write, and damaged ones."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import gguf
import hostile
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.errors import ModelFileError, SpecdecError, UnsupportedError
from specdec.gguf_file import GGUFFile

SCALARS = {
    "uint8": 200,
    "int8": -100,
    "uint16": 60_000,
    "int16": -30_000,
    "uint32": 4_000_000_000,
    "int32": -2_000_000_000,
    "uint64": 2**64 - 1,
    "int64": -(2**63),
    "float32": 0.5,
    "float64": 1 / 3,
    "bool": True,
    "string": "naïve 字",
}


def write_model(path: Path, fill: Callable[[gguf.GGUFWriter], None], **options: int) -> Path:
    writer = gguf.GGUFWriter(path, "tiny", **options)
    fill(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def fill_everything(writer: gguf.GGUFWriter) -> None:
    for name, value in SCALARS.items():
        getattr(writer, f"add_{name}")(f"tiny.{name}", value)
    writer.add_array("tiny.ints", [1, -2, 3])
    writer.add_array("tiny.floats", [0.5, -1.5])
    writer.add_array("tiny.bools", [True, False, True])
    writer.add_array("tiny.strings", ["a", "", "字"])
    writer.add_array("tiny.nested", [[1, 2], [3]])
    writer.add_tensor("matrix", np.arange(12, dtype=np.float32).reshape(3, 4))
    writer.add_tensor("half", np.arange(6, dtype=np.float16).reshape(1, 2, 3))
    writer.add_tensor("map", np.arange(5, dtype=np.int64))
    q8 = gguf.quants.quantize(np.ones((2, 64), np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("quantised", q8, raw_dtype=gguf.GGMLQuantizationType.Q8_0)


def as_version_2(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[4:8] = hostile.u32(2)
    path.write_bytes(data)


@pytest.fixture
def everything(tmp_path: Path) -> Path:
    return write_model(tmp_path / "everything.gguf", fill_everything)


def touch_everything(path: Path) -> None:
    """Reads all there is to read; tensors of unknown types may refuse."""
    with GGUFFile.open(path) as file:
        for key in file.metadata:
            file.metadata[key]
        for name in file.tensors:
            try:
                file.load(name)
            except UnsupportedError as error:
                assert "cannot be decoded; supported: F32" in str(error)  # noqa: PT017


@pytest.mark.parametrize("version", [2, 3])
def test_metadata_of_every_type(everything: Path, version: int) -> None:
    if version == 2:
        as_version_2(everything)
    with GGUFFile.open(everything) as file:
        assert file.version == version
        assert file.architecture == "tiny"
        for name, value in SCALARS.items():
            assert file.metadata[file.key(name)] == value
            assert type(file.metadata[file.key(name)]) is type(value)
        assert file.metadata["tiny.ints"].tolist() == [1, -2, 3]
        assert file.metadata["tiny.floats"].tolist() == [0.5, -1.5]
        assert file.metadata["tiny.bools"].tolist() == [True, False, True]
        assert file.metadata["tiny.strings"] == ["a", "", "字"]
        assert [part.tolist() for part in file.metadata["tiny.nested"]] == [[1, 2], [3]]
        assert set(file.metadata) >= {"tiny.ints", "general.architecture"}
        assert len(file.metadata) == len(list(file.metadata))
        assert "tiny.absent" not in file.metadata


def test_typed_getters(everything: Path) -> None:
    with GGUFFile.open(everything) as file:
        assert file.get_int("tiny.uint64") == 2**64 - 1
        assert file.get_float("tiny.float64") == 1 / 3
        assert type(file.get_float("tiny.int8")) is float
        assert file.get_bool("tiny.bool") is True
        assert file.get_str("tiny.string") == "naïve 字"
        assert file.get_ints("tiny.ints") == [1, -2, 3]
        assert file.get_ints("tiny.ints", length=3) == [1, -2, 3]
        assert file.get_ints("tiny.uint8", length=2) == [200, 200]
        assert file.get_floats("tiny.floats") == [0.5, -1.5]
        assert file.get_floats("tiny.ints") == [1.0, -2.0, 3.0]
        assert file.get_bools("tiny.bools") == [True, False, True]
        assert file.get_bools("tiny.bool", length=2) == [True, True]
        assert file.get_strs("tiny.strings") == ["a", "", "字"]
        assert file.get_int("tiny.absent", 7) == 7
        assert file.get_str("tiny.absent", None) is None
        assert file.get_ints("tiny.absent", None) is None
        assert file.get_floats("tiny.absent", None) is None
        assert file.get_bools("tiny.absent", None) is None
        assert file.get_strs("tiny.absent", None) is None


@pytest.mark.parametrize(
    ("get", "message"),
    [
        (lambda f: f.get_int("tiny.absent"), "key 'tiny.absent' is missing, expected an integer"),
        (lambda f: f.get_int("tiny.bool"), "'tiny.bool': found the bool True, expected an integer"),
        (lambda f: f.get_int("tiny.float32"), "found the float 0.5, expected an integer"),
        (lambda f: f.get_float("tiny.string"), "found the string 'naïve 字', expected a number"),
        (lambda f: f.get_bool("tiny.int8"), "found the int -100, expected true or false"),
        (lambda f: f.get_str("tiny.ints"), "found an array of 3 int32, expected a string"),
        (lambda f: f.get_ints("tiny.floats"), "found an array of 2 float32, expected an array of"),
        (lambda f: f.get_ints("tiny.uint8"), "found the int 200, expected an array of integers"),
        (lambda f: f.get_ints("tiny.ints", length=4), "array of 3 int32, expected 4 integers"),
        (lambda f: f.get_ints("tiny.nested", length=2), "an array of 2 arrays, expected 2 int"),
        (lambda f: f.get_ints("tiny.bools"), "found an array of 3 bool, expected an array of int"),
        (lambda f: f.get_floats("tiny.bool", length=2), "found the bool True, expected 2 numbers"),
        (lambda f: f.get_bools("tiny.floats"), "expected an array of truth values"),
        (lambda f: f.get_strs("tiny.string"), "expected an array of strings"),
        (lambda f: f.get_strs("tiny.ints"), "expected an array of strings"),
        (lambda f: f.load("absent"), "tensor 'absent' is missing"),
        (lambda f: f.raw("absent"), "tensor 'absent' is missing"),
    ],
)
def test_what_does_not_fit_is_named(
    everything: Path, get: Callable[[GGUFFile], object], message: str
) -> None:
    with GGUFFile.open(everything) as file, pytest.raises(ModelFileError) as caught:
        get(file)
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"{everything}: ")


def test_overrides_win(everything: Path) -> None:
    overrides = {"tiny.uint8": 3, "tiny.new": "x", "general.architecture": "other"}
    with GGUFFile.open(everything, overrides) as file:
        assert file.get_int("tiny.uint8") == 3
        assert file.metadata["tiny.new"] == "x"
        assert file.key("a") == "other.a"
        assert len(file.metadata) == len(set(file.metadata))


def test_tensors_by_name(everything: Path) -> None:
    with GGUFFile.open(everything) as file:
        assert list(file.tensors) == ["matrix", "half", "map", "quantised"]
        assert file.info("half").shape == (1, 2, 3)
        assert file.info("half").n_elements == 6
        assert file.info("quantised").ggml_type == "Q8_0"
        assert file.info("quantised").n_bytes == file.raw("quantised").size == 4 * 34
        assert file.load("matrix").tolist() == np.arange(12.0).reshape(3, 4).tolist()
        assert file.load("half").dtype == torch.float32
        assert file.load("map").dtype == torch.int64
        ones = file.load("quantised")
        assert ones.shape == (2, 64)
        assert torch.allclose(ones, torch.ones(2, 64), atol=1e-3)


def test_raw_is_a_view_that_outlives_the_file(everything: Path) -> None:
    with GGUFFile.open(everything) as file:
        raw = file.raw("matrix")
    assert not raw.flags.owndata
    assert not raw.flags.writeable
    assert raw.view(np.float32).tolist() == list(range(12))


def test_custom_alignment(tmp_path: Path) -> None:
    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_custom_alignment(1024)
        writer.add_tensor("a", np.ones(3, np.float32))
        writer.add_tensor("b", np.full(3, 2, np.float32))

    with GGUFFile.open(write_model(tmp_path / "aligned.gguf", fill)) as file:
        assert file.info("b").offset - file.info("a").offset == 1024
        assert file.load("b").tolist() == [2, 2, 2]


class TestSplit:
    @pytest.fixture
    def shards(self, tmp_path: Path) -> list[Path]:
        def fill(writer: gguf.GGUFWriter) -> None:
            writer.add_uint32("tiny.block_count", 3)
            for i in range(5):
                writer.add_tensor(f"t{i}", np.full((2, 2), i, np.float32))

        write_model(tmp_path / "split.gguf", fill, split_max_tensors=2)
        return sorted(tmp_path.glob("split-*-of-00003.gguf"))

    def test_the_first_file_opens_all(self, shards: list[Path]) -> None:
        assert len(shards) == 3
        with GGUFFile.open(shards[0]) as file:
            assert file.get_int("tiny.block_count") == 3
            assert [file.info(f"t{i}").file_index for i in range(5)] == [0, 0, 1, 1, 2]
            assert [file.load(f"t{i}")[1, 1].item() for i in range(5)] == [0, 1, 2, 3, 4]

    def test_a_later_file_names_the_first(self, shards: list[Path]) -> None:
        with pytest.raises(ModelFileError, match=r"is file 2 of 3 .* split-00001-of-00003\.gguf$"):
            GGUFFile.open(shards[1])

    def test_a_missing_file_is_named(self, shards: list[Path]) -> None:
        shards[2].unlink()
        with pytest.raises(ModelFileError, match=r"split-00003-of-00003\.gguf: no such file"):
            GGUFFile.open(shards[0])

    def test_a_renamed_file(self, shards: list[Path]) -> None:
        renamed = shards[0].rename(shards[0].with_name("model.gguf"))
        with pytest.raises(ModelFileError, match=r"ends in -00001-of-00003\.gguf"):
            GGUFFile.open(renamed)

    def test_files_of_different_models(self, shards: list[Path]) -> None:
        shards[2].write_bytes(shards[1].read_bytes())
        with pytest.raises(ModelFileError, match="are 1 and 3, expected 2 and 3"):
            GGUFFile.open(shards[0])

    @pytest.mark.parametrize(
        ("names", "message"),
        [
            (["t0", "t2", "t3"], r"00002-of-00003\.gguf: tensor 't0' is in .*00001-of-00003"),
            (["t2"], "found 3 tensors in 3 files, expected 5"),
        ],
    )
    def test_tensors_must_add_up(self, shards: list[Path], names: list[str], message: str) -> None:
        for index, own_names in ((1, names), (2, [])):
            shards[index].write_bytes(
                hostile.gguf(
                    [
                        hostile.entry(b"split.no", hostile.UINT32, hostile.u32(index)),
                        hostile.entry(b"split.count", hostile.UINT32, hostile.u32(3)),
                    ],
                    [
                        hostile.tensor(name.encode(), [4], offset=32 * i)
                        for i, name in enumerate(own_names)
                    ],
                    bytes(96),
                )
            )
        with pytest.raises(ModelFileError, match=message):
            GGUFFile.open(shards[0])

    def test_a_count_that_is_no_number(self, tmp_path: Path) -> None:
        path = tmp_path / "model.gguf"
        path.write_bytes(hostile.with_entry(hostile.BOOL, b"\1", key=b"split.count"))
        with pytest.raises(ModelFileError, match=r"'split\.count': found the bool True"):
            GGUFFile.open(path)


def test_paths_that_are_no_files(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"absent\.gguf: no such file; check the path"):
        GGUFFile.open(tmp_path / "absent.gguf")
    with pytest.raises(ModelFileError, match="is a directory"):
        GGUFFile.open(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ModelFileError, match="is not a regular file"):
        GGUFFile.open(tmp_path / "pipe")
    with pytest.raises(ModelFileError, match="cannot be read"):
        GGUFFile.open("a\0b")
    with pytest.raises(ModelFileError, match="cannot be read: File name too long"):
        GGUFFile.open("a" * 5000)


def test_a_file_that_may_not_be_read(everything: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ModelFileError, match="permission denied"):
        GGUFFile.open(everything)


@pytest.mark.parametrize("name", hostile.HARMLESS)
def test_harmless_oddities_load(tmp_path: Path, name: str) -> None:
    path = tmp_path / "odd.gguf"
    path.write_bytes(hostile.HARMLESS[name])
    touch_everything(path)


def test_oddities_read_sensibly(tmp_path: Path) -> None:
    path = tmp_path / "odd.gguf"
    path.write_bytes(hostile.HARMLESS["bool_7"])
    assert GGUFFile.open(path).get_bool("x") is True
    path.write_bytes(hostile.HARMLESS["key_not_utf8"])
    assert GGUFFile.open(path).get_int("\ufffd\ufffd") == 1
    path.write_bytes(hostile.HARMLESS["dims_none"])
    assert GGUFFile.open(path).load("t").shape == ()
    path.write_bytes(hostile.HARMLESS["array_empty"])
    assert GGUFFile.open(path).get_strs("x") == []


@pytest.mark.parametrize("name", hostile.BROKEN)
def test_broken_files_end_in_one_line_at_once(tmp_path: Path, name: str) -> None:
    data, message = hostile.BROKEN[name]
    path = tmp_path / f"{name}.gguf"
    path.write_bytes(data)
    start = time.process_time()
    tracemalloc.start()
    with pytest.raises(SpecdecError, match=message) as caught:
        GGUFFile.open(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)
    assert peak < 10_000_000
    assert time.process_time() - start < 5  # what is waited for does not count


def test_a_tensor_of_unknown_type_is_listed_but_not_loaded(tmp_path: Path) -> None:
    path = tmp_path / "new.gguf"
    new, old = hostile.tensor(b"new", [4], kind=250), hostile.tensor(b"old", [4], offset=32)
    path.write_bytes(hostile.with_tensors(new, old))
    with GGUFFile.open(path) as file:
        assert file.info("new").ggml_type == "type 250"
        assert file.load("old").tolist() == [0, 0, 0, 0]
        for read in (file.load, file.raw):
            with pytest.raises(UnsupportedError, match=r"'new': type 250 cannot .*: F32, F16, Q4"):
                read("new")


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("good") / "good.gguf", fill_everything)


@settings(max_examples=500)
@given(data=st.data())
def test_damaged_files_load_or_end_in_one_line(good: Path, data: st.DataObject) -> None:
    content = bytearray(good.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(content) - 1))
        patch = data.draw(
            st.one_of(
                st.binary(min_size=1, max_size=8),
                st.sampled_from([b"\xff" * 8, b"\0" * 8, hostile.u64(2**40), hostile.u32(9)]),
            )
        )
        content[at : at + len(patch)] = patch
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content))) :]
    path = good.with_name("damaged.gguf")
    path.write_bytes(content)
    start = time.process_time()
    try:
        touch_everything(path)
    except SpecdecError as error:
        assert "\n" not in str(error)  # noqa: PT017
    assert time.process_time() - start < 5  # what is waited for does not count


def test_truncation_anywhere_is_noticed(good: Path) -> None:
    content = good.read_bytes()
    path = good.with_name("short.gguf")
    with GGUFFile.open(good) as file:
        last = max(info.offset + info.n_bytes for info in file.tensors.values())
    for size in range(0, last, 7):
        path.write_bytes(content[:size])
        with pytest.raises(ModelFileError):
            GGUFFile.open(path)


def test_a_big_vocabulary_opens_quickly(tmp_path: Path) -> None:
    """Strings are skipped when a file is opened, decoded when they are asked for, and not kept."""
    tokens = [f"token {i} é" for i in range(150_000)]
    path = write_model(tmp_path / "v.gguf", lambda w: w.add_array("tokenizer.ggml.tokens", tokens))
    start = time.process_time()
    with GGUFFile.open(path) as file:
        opened = time.process_time()
        assert file.get_strs("tokenizer.ggml.tokens") == tokens
        first, second = (file.metadata["tokenizer.ggml.tokens"] for _ in range(2))
        assert first == second
        assert first is not second
    assert opened - start < 0.3
    assert time.process_time() - start < 1


def test_opening_needs_no_torch(good: Path) -> None:
    code = (
        "import sys; from specdec.gguf_file import GGUFFile; "
        "GGUFFile.open(sys.argv[1]); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(good)], check=True)
