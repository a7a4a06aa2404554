"""The laws of the examples: the same data everywhere, models of the promised shape, what digits
comes to, and the bits of images and gan through a death."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch
from cluster import Cluster

from elastic_trainer.config import ConfigError
from elastic_trainer.examples import digits, finetune, gan, gpt, pictures, resnet


@pytest.fixture(scope="module")
def source() -> bytes:
    return gpt.standard_library()


def test_gpt_reads_the_same_bytes_whatever_the_order_of_the_folder(tmp_path: Path) -> None:
    """Files come by their relative names; what is no source, installed, built or a test is left
    out."""
    files = {"b.py": "B", "a/z.py": "AZ", "a.py": "A", "a/b/c.py": "ABC", "n.txt": "no",
             "_sysconfigdata_x.py": "no"}
    files |= {"site-packages/x.py": "no", "a/tests/t.py": "no", "config-3.11/c.py": "no"}
    for name, text in reversed(files.items()):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert gpt.standard_library(tmp_path) == b"A" + b"ABC" + b"AZ" + b"B"


def test_gpt_data_is_read_once_and_the_same_each_time(source: bytes,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    """A newcomer must not wait for its data: it is a few MB, and no file is read twice."""
    read, read_bytes = list[Path](), Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read.append(path) or read_bytes(path))
    assert gpt.standard_library() == source
    assert len(read) == len(set(read)) > 100 and 2**20 < len(source) < 2**25


def test_gpt_windows_are_the_bytes_without_overlap() -> None:
    """Put together, the windows are the source again, but for the last bytes that fill none."""
    source = bytes(range(256)) * 2
    windows = gpt.SourceWindows(source, context=9)
    assert len(windows) == 51
    assert bytes(torch.cat([windows[i] for i in range(51)]).tolist()) == source[:510]
    several = windows.__getitems__([7, 0, 7])
    assert [bytes(window.tolist())
            for window in several] == [source[70:80], source[:10], source[70:80]]


def test_gpt_has_the_promised_size_and_shape() -> None:
    """About a million parameters; logits for each next byte; a loss of ln 256 before training."""
    torch.manual_seed(0)
    model = gpt.GPT()
    assert 0.8e6 < sum(parameter.numel() for parameter in model.parameters()) < 1.5e6
    windows = torch.randint(256, (2, model.context + 1), dtype=torch.uint8)
    assert model(windows[:, :-1].long()).shape == (2, model.context, 256)
    assert float(gpt.next_byte_loss(model, windows).detach()) == pytest.approx(math.log(256),
                                                                               abs=0.1)


def test_gpt_sees_only_the_past() -> None:
    """A later byte never changes an earlier prediction."""
    model = gpt.GPT(layers=2).eval()
    one = torch.randint(256, (1, 16))
    other = one.clone()
    other[0, 10] = (one[0, 10] + 1) % 256
    difference = (model(one) - model(other)).detach().abs().amax(dim=2)[0]
    assert float(difference[:10].max()) == 0.0 and float(difference[10:].min()) > 0.0


def test_gpt_needs_its_random_numbers() -> None:
    """Dropout is on in training, so the seeds of the micro-batches are part of the result."""
    model, windows = gpt.GPT(layers=1), torch.zeros(1, 9, dtype=torch.uint8)
    losses = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        losses.append(float(gpt.next_byte_loss(model, windows).detach()))
    assert losses[0] == losses[2] != losses[1]


def test_finetune_pads_texts_and_counts_the_tokens_that_are_predicted() -> None:
    """Of each text, all bytes but the first one, and its end."""
    batch = finetune.padded([b"ab", b"abcd"])
    assert batch["input_ids"].tolist() == [[97, 98, 257, 256, 256], [97, 98, 99, 100, 257]]
    assert batch["labels"].tolist() == [[97, 98, 257, -100, -100], [97, 98, 99, 100, 257]]
    assert batch["attention_mask"].sum() == 8
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = finetune.language_model()
    assert 0.2e6 < sum(parameter.numel() for parameter in model.parameters()) < 0.3e6
    loss_sum, tokens, hits = finetune.predictions(model, batch)
    each = [finetune.predictions(model, finetune.padded([text])) for text in (b"ab", b"abcd")]
    assert (tokens, [one[1] for one in each]) == (6, [2, 4]) and 0 <= hits <= tokens
    assert loss_sum.item() == pytest.approx(sum(one[0].item() for one in each), rel=1e-5)
    assert loss_sum.item() / tokens == pytest.approx(math.log(258), abs=0.2)


def test_finetune_texts_are_whole_functions_and_the_held_out_ones_are_others() -> None:
    """They are the same each time."""
    training, held_out = finetune.texts()
    assert (training, held_out) == finetune.texts()
    assert len(training) > 4000 and len(held_out) == 256
    starts = (b"def ", b"class ", b"async def ", b"@")
    assert all(text.startswith(starts) and len(text) <= 256 for text in training + held_out)


def test_digits_split_is_fixed_and_disjoint() -> None:
    """Each image is either trained on or tested on, the same ones each time, all digits in both."""
    training, test = digits.digits()
    assert (len(training), len(test)) == (1437, 360)
    again = digits.digits()[1]
    assert torch.equal(test.tensors[0], again.tensors[0]) and torch.equal(
        test.tensors[1], again.tensors[1])
    for part in (training, test):
        images, labels = part.tensors
        assert images.shape[1:] == (1, 8,
                                    8) and 0.0 <= float(images.min()) <= float(images.max()) <= 1.0
        assert set(labels.tolist()) == set(range(10))


def test_digits_net_reads_batches_of_any_size_and_has_statistics_to_keep() -> None:
    """A micro-batch may be a single image; BatchNorm's buffers change in training and not in the
    test."""
    model = digits.digit_net()
    for size in (1, 5):
        assert model(torch.rand(size, 1, 8, 8)).shape == (size, 10)
    before = [buffer.clone() for buffer in model.buffers()]
    images, labels = digits.digits()[1].tensors
    loss = digits.digit_loss(model, [images[:8], labels[:8]])
    assert loss.shape == () and any(
        not torch.equal(old, new) for old, new in zip(before, model.buffers(), strict=True))
    before = [buffer.clone() for buffer in model.buffers()]
    assert 0.0 <= digits.accuracy(model, torch.utils.data.TensorDataset(images, labels)) <= 1.0
    assert all(torch.equal(old, new) for old, new in zip(before, model.buffers(), strict=True))


def test_digits_are_read_with_at_least_97_percent(tmp_path: Path) -> None:
    """After 3 of its 10 epochs already (98.6 % measured); alone, which is to the bit what any world
    would have."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("HOROVOD_", "ELASTIC_"))}
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).resolve().parent.parent), *sys.path])
    done = subprocess.run([*command("digits"), "--epochs", "3"], env=env, cwd=tmp_path,
                          capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split("test accuracy ")[1]) >= 0.97


QUICK = ("import quick_boot, runpy; runpy.run_module('elastic_trainer.examples.{}', "
         "run_name='__main__', alter_sys=True)")


def command(example: str) -> list[str]:
    return [sys.executable, "-m", f"elastic_trainer.examples.{example}"]


def test_images_resnets_have_the_parameters_of_torchvisions() -> None:
    """The number is that of torchvision's documentation, and so are the names."""
    for build, count in ((resnet.resnet18, 11_689_512), (resnet.resnet50, 25_557_032)):
        with torch.device("meta"):
            model = build(1000)
        assert sum(parameter.numel() for parameter in model.parameters()) == count
        names = model.state_dict()
        assert {"conv1.weight", "layer2.0.downsample.1.running_var", "layer4.1.bn2.bias",
                "fc.bias"} <= set(names)


def test_images_small_stem_keeps_the_resolution() -> None:
    """An image of 32 pixels is not halved before the second stage."""
    model = resnet.resnet18(10, stem="cifar", width=8)
    seen: list[torch.Size] = []
    model.layer1.register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    assert model(torch.rand(2, 3, 32, 32)).shape == (2, 10)
    assert seen == [torch.Size([2, 8, 32, 32])]


def test_images_are_drawn_alike_everywhere_and_augmented_by_torchs_seed() -> None:
    """Test images have no random part; training images follow the seed; both have all classes."""
    training, test, classes, size = pictures.load("", None)
    assert (classes, size, training[0][0].shape) == (10, 32, (3, 32, 32))
    assert torch.equal(test[3][0], test[3][0]) and not torch.equal(test[3][0], test[13][0])
    seen = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        seen.append(training[5][0])
    assert torch.equal(seen[0], seen[2]) and not torch.equal(seen[0], seen[1])
    assert {test[index][1] for index in range(20)} == set(range(10))


def test_images_are_read_from_cifars_files_and_from_folders(tmp_path: Path) -> None:
    """A record is a class and 3072 colours; a folder of images is a class; what is neither is an
    error that names --data."""
    from PIL import Image

    records = numpy.random.default_rng(0).integers(0, 256, (4, pictures.RECORD), numpy.uint8)
    records[:, 0] = [3, 1, 4, 1]
    cifar, folder = tmp_path / "cifar", tmp_path / "folder"
    cifar.mkdir()
    for name in ("data_batch_1.bin", "data_batch_2.bin", "test_batch.bin"):
        (cifar / name).write_bytes(records.tobytes())
    training, test, classes, size = pictures.load(str(cifar), None)
    assert (len(training), len(test), classes, size) == (8, 4, 10, 32)
    assert [training[index][1] for index in range(8)] == [3, 1, 4, 1] * 2
    red = test[2][0][0, 0, :2] * pictures.DEVIATION[0, 0] + pictures.MEAN[0, 0]
    assert torch.allclose(255 * red, torch.from_numpy(records[2, 1:3]).float(), atol=1e-3)
    for part, label in (("train", "cat"), ("train", "dog"), ("val", "cat"), ("val", "dog")):
        (folder / part / label).mkdir(parents=True)
        colour = (255, 0, 0) if label == "dog" else (0, 0, 255)
        Image.new("RGB", (50, 40), colour).save(folder / part / label / "1.png")
    training, test, classes, size = pictures.load(str(folder), 24)
    assert (len(training), classes, test[1][1]) == (2, 2, 1) and training[1][0].shape == (3, 24, 24)
    assert (test[1][0] * pictures.DEVIATION + pictures.MEAN)[:, 9, 9].round().tolist() == [1, 0, 0]
    with pytest.raises(ConfigError, match="--data is .*neither"):
        pictures.load(str(tmp_path), None)
    (tmp_path / "batches.meta").touch()
    with pytest.raises(ConfigError, match="--data is .*pickles"):
        pictures.load(str(tmp_path), None)


def test_gan_phases_train_only_their_own_net() -> None:
    """The generator's loss reaches the generator, the discriminator's loss does not."""
    torch.manual_seed(0)
    model = gan.Gan()
    model.loss_d(torch.rand(4, 1, 8, 8)).backward()
    assert all(parameter.grad is None for parameter in model.generator.parameters())
    model.loss_g(4).backward()
    assert all(parameter.grad is not None for parameter in model.generator.parameters())
    assert len(gan.as_text(model.sample(0)).splitlines()) == 8


@pytest.mark.parametrize(("example", "arguments", "at"), [
    ("images", ("--steps", "10", "--width", "8", "--global-batch", "32", "--loader", "1",
                "--precision", "bf16", "--evaluate-every", "5 steps"), 3),
    ("gan", ("--steps", "80"), 10)])
def test_no_bit_of_an_example_is_another_when_a_worker_dies(
        tmp_path: Path, example: str, arguments: tuple[str, ...], at: int) -> None:
    """The world of 4 loses a worker in mid-run, and ends with the weights of one worker alone."""
    twin = tmp_path / "twin"
    job = [sys.executable, "-c", QUICK.format(example), *arguments, "--checkpoint-every", "1000"]
    env = os.environ | {"ELASTIC_TRAINER_RUN_DIR": str(twin)}
    done = subprocess.run(job, env=env, timeout=300, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with Cluster(tmp_path, command=job) as cluster:
        cluster.wait_for_step(at)
        cluster.signal_worker("127.0.0.2", signal.SIGKILL)
        assert cluster.finish() == 0
        weights = json.loads((twin / "result.json").read_text())["weights_sha256"]
        cluster.assert_nothing_lost(weights, victims=1)
