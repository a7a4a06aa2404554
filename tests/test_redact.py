"""Secrets of the command line, the configuration and the environment, and what only looks so."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from elastic_trainer.commands.command import main
from elastic_trainer.events.log import EVENTS_FILE, Events, read_events
from elastic_trainer.state.configuration import changes
from elastic_trainer.wire.redact import (
    redacted,
    redacted_command,
    redacted_settings,
    redacted_value,
)

SECRET = "V3ry-s3cret"
NAMED = (
    f"--api-key={SECRET}", f"--api-key {SECRET}", f"--api_key={SECRET}", f"--apiKey={SECRET}",
    f"--token {SECRET}", f"--hf-token={SECRET}", f"--password '{SECRET} x'", f"--key {SECRET}",
    f"--wandb-api-key={SECRET}", f"--client-secret={SECRET}", f"WANDB_API_KEY={SECRET}",
    f"PGPASSWORD={SECRET}", f"MYSQL_PWD={SECRET}", f"AWS_SECRET_ACCESS_KEY={SECRET}",
    f"--db postgres://user:{SECRET}@host/db", f"--proxy http://{SECRET}@proxy:3128",
    f"https://host/?a=1&X-Amz-Signature={SECRET}&b=2", f"https://host/?sig={SECRET}",
    f"Authorization: Bearer {SECRET}", f"-H 'authorization: bearer {SECRET}'",
    f"--config={{\"api_key\": \"{SECRET}\", \"lr\": 1}}", f"--set hub.token={SECRET}",
    f"--config '{{\"hub\": {{\"password\": \"{SECRET}\"}}}}'", f"['--api-key', '{SECRET}', '--lr']",
    f"{{'api_key': '{SECRET}'}}", f"password: {SECRET}", f"x-api-key: {SECRET}",
    f"{{\\\"api_key\\\": \\\"{SECRET}\\\"}}", f"--aws-session-token={SECRET}",
    f"--passphrase={SECRET}", f"--db-credentials {SECRET}", f"api_token='{SECRET}'",
    f"password = {SECRET}", f"api_key = \"{SECRET}\"", f"password:{SECRET}", f"x-api-key:{SECRET}",
    f"{{'password': b'{SECRET}'}}", f"Config(password=b'{SECRET}')", f"api_key==\"{SECRET}\"",
    f"--password=ab({SECRET}", f"--password ab,{SECRET}", f"--password=ab&{SECRET}",
    f"--password ab'{SECRET}", f"s3://AKIAIOSFODNN7EXAMPLE:ab/{SECRET}@bucket/x",
    f"DB_PASS={SECRET}", f"--smtp-pass {SECRET}", f"--pass={SECRET}", f"--db_pw={SECRET}",
    f"--wandbkey={SECRET}", f"{{\"password\": [\"{SECRET}\", 1]}}", f"\"password\"={SECRET}",
    f"{{\"secret\":{{\"a\":\"{SECRET}\"}}}}", f"os.environ['API_KEY'] = '{SECRET}'",
    f"api key: {SECRET}", f"('password', '{SECRET}')", f"api_key := {SECRET}",
    f"password => '{SECRET}'", f"token=\"{SECRET}", f"pass_word={SECRET}", f"$env:TOKEN='{SECRET}'",
    f"AccountKey={SECRET}==;EndpointSuffix=x", f"curl -u me:{SECRET}", f"--user=me:{SECRET}",
    f"--mnemonic {SECRET}", f"--totp={SECRET}", f"my-apikey:{SECRET}", f"JOB-TOKEN: {SECRET}",
    f"login me password {SECRET}", f"the password is {SECRET}",
)
FORMED = (
    "AKIAIOSFODNN7EXAMPLE", "ASIAIOSFODNN7EXAMPLE", "hf_AbCdEfGhIjKlMnOpQrStUvWx",
    "hf_0123456789ab", "ghp_0123456789abcdefABCDEF0123456789", "github_pat_11AAAAAAA0_abcdefgh",
    "sk-proj-0123456789abcdef", "sk-ant-api03-0123456789", "glpat-0123456789abcdef",
    "xoxb-1234567890-ab",
    "AIzaSyA0123456789abcdefghijklmnopqrstuv", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl",
    "sk_live_51H8abcdefGHIJKLmnop", "dapi0123456789abcdef0123456789abcdef",
    "ya29.a0AfH6SMBxyz0123456789abcdefgh", "GOCSPX-abcdef0123456789abcdef",
    "SG.abcdefghijklmnopqrstuv.abcdefghijklmnopqrstuvwxyz0123456789ABCDEFG",
    "pypi-AgEIcHlwaS5vcmcCJDAwMDAwMDAw", "dckr_pat_abcdefghijklmnopqrstuv12345",
    "nvapi-abcdefghijklmnop0123456789", "gsk_abcdefghijklmnop0123456789",
    "xai-abcdefghij0123456789", "glrt-0123456789abcdefghij",
    "wandb_v1_abcdefgh0123456789", "123456789:AAE0123456789abcdefghijklmnopqrstuvw",
    "-----BEGIN PGP PRIVATE KEY BLOCK-----\nabc\n-----END PGP PRIVATE KEY BLOCK-----",
    "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXk\n-----END OPENSSH PRIVATE KEY-----",
)
HARMLESS = (
    "--num-keys 5", "--tokenizer bert-base", "--max-tokens 100", "--key-dim 64", "--monkey x",
    "--sort-key length", "--shard-key user_id", "--eos-token '</s>'", "--pad-token [PAD]",
    "--token-file /run/token", "--keyboard us", "--tokens 2048", "--keypoints a.json",
    "monkey=1 tokens=5", "--lr 1e-3",
    "s3://bucket/key=5/part", "https://host:443/a@b", "sorted(rows, key=len)", "KeyError: 'x'",
    "sk-learn-pipeline", "hf_hub_download", "task-12345678901", "the key: abc", "--author me",
    "the bearer token is missing", "--signal 9", "--use-auth-token --fast", "--n-head 8",
    "--csv-caption-key title", "--csv-img-key filepath", "--checkpoint_key teacher",
    "--json-keys text", "--word-delimiter-token |", "--state-key model", "--sig 0.5",
    "--forward-pass eager", "--bypass on", "--secretary bob", "--keys-only x", "--ignore-keys head",
    "--arch sk-resnet50d8", "--model pk-vit-base-16", "--run sk-2024-10-11", "npm_config_x1234567",
    "--ckpt hf_bert_base_2024", "hf_transfer123", "r8_conv2d_3x3", "git@github.com:me/repo.git",
    "unexpected token: )", "--global-pool token", "passes = 3", "a token == b", "key = image",
    "--rng-key threefry", "--pixel-key rgb", "--instance-token sks", "--key-padding-mask on",
    "--tokens-per-batch auto", "--passwordless yes", "--lmdb-key data", "docker run -u 1000:1000",
    "--user me", "the password is wrong", "--gt-key mask",
    "--no-password", "--secret-dim 4", "--design x", "--token-embedding-size 3", "-k killed",
)


@pytest.mark.parametrize("text", NAMED)
def test_a_secret_is_replaced_when_its_name_shows_it(text: str) -> None:
    """Whatever the form: one argument or two, a variable, a URL, JSON, a header."""
    shown = redacted(f"python train.py {text} --epochs 3")
    assert SECRET not in shown and "***" in shown
    assert shown.startswith("python train.py ") and shown.endswith(" --epochs 3")
    assert redacted(shown) == shown


@pytest.mark.parametrize("secret", FORMED)
def test_a_secret_is_replaced_when_only_its_form_shows_it(secret: str) -> None:
    """Under a harmless name, in a sentence, and in the middle of a line."""
    for text in (f"--model {secret}", f"it said {secret}, and ended", f"name={secret}"):
        shown = redacted(text)
        assert secret not in shown and "***" in shown


@pytest.mark.parametrize("text", HARMLESS)
def test_what_only_looks_like_a_secret_stays(text: str) -> None:
    """Numbers, kinds of keys and tokens that are none, names that speak of a secret, other words.
    """
    line = f"python train.py {text} --epochs 3"
    assert redacted(line) == line
    if text.startswith("-"):
        assert redacted_command(line.split()) == line.split()


def test_the_two_words_of_an_option_are_one_secret() -> None:
    """Also where the value is JSON, has blanks, or belongs to the next option."""
    words = ["python", "train.py", "--api-key", SECRET, "--password", f"{SECRET} and more",
             "--config", json.dumps({"api_key": SECRET, "lr": 1}), "--token", "--lr", "1",
             "--api-keys", SECRET, f"{SECRET}2", "--lr", f"TOKEN={SECRET}",
             f"--list={json.dumps([{'password': SECRET}])}"]
    shown = redacted_command(words)
    assert SECRET not in " ".join(shown) and len(shown) == len(words)
    assert shown[:4] == ["python", "train.py", "--api-key", "***"]
    assert shown[7:11] == ['{"api_key": "***", "lr": 1}', "--token", "--lr", "1"]


def test_a_structure_has_no_secret_below_the_name_of_one() -> None:
    """Nested, in lists, as numbers; what has another name keeps its value and its type."""
    given = {"hub": {"token": SECRET, "n_tokens": 5}, "passwords": {"db": SECRET, "port": 4711},
             "api_keys": [SECRET, SECRET], "password": 1234, "is_secret": False,
             "optimizer": {"lr": 0.1, "betas": [0.9, 0.99]}, "tokenizer": "bert"}
    shown = redacted_value(given)
    assert SECRET not in json.dumps(shown) and "4711" not in json.dumps(shown)
    assert shown["password"] == "***" and shown["is_secret"] is False
    assert shown["optimizer"] == given["optimizer"] and shown["tokenizer"] == "bert"
    assert shown["hub"]["n_tokens"] == 5


def test_the_value_of_a_secret_variable_is_replaced_wherever_it_stands(
        monkeypatch: pytest.MonkeyPatch) -> None:
    """Also within a word. A short one stays: it stands in any text."""
    monkeypatch.setenv("MY_SERVICE_TOKEN", "plainwordswithoutform")
    monkeypatch.setenv("MY_OTHER_TOKEN", "abc")
    assert redacted("xplainwordswithoutformx abc") == "x***x abc"


def test_the_current_folder_is_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every shell has PWD, which is a name of passwords, too: MYSQL_PWD."""
    monkeypatch.setenv("PWD", "/home/me/project")
    monkeypatch.setenv("MYSQL_PWD", "/3cret-of-mine")
    text = "token=abc, /home/me/project/train.py, PWD=/home/me/project"
    assert redacted(text) == text.replace("abc", "***")
    assert redacted("it is /3cret-of-mine") == "it is ***"


@pytest.mark.parametrize("text", [
    "key=a=" * 5000, "key." * 10000, "sk-" + "a" * 30000, "token:" * 5000, "key://" + "a:" * 10000,
    '"key": ' + '"' * 20000, "key: " + "[" * 20000, "--key " + "-" * 20000, "key" + "=" * 20000])
def test_a_text_of_any_form_is_looked_through(text: str) -> None:
    """Without an error, and without a search that takes minutes (pytest's own limit)."""
    assert isinstance(redacted(text), str)


def test_a_configuration_is_kept_without_secrets_and_still_compared() -> None:
    """A rotated API key changes no bit. A key of a weaker name leaves a digest, so that another
    column of the data is a change. What a checkpoint of before kept in clear counts alike."""
    was = {"hub.api_key": SECRET, "data.key": "image", "model.width": 8}
    kept = redacted_settings(was)
    assert SECRET not in json.dumps(kept) and "image" not in json.dumps(kept)
    assert changes(kept, was) == [] == changes(was, kept)
    assert changes(kept, was | {"hub.api_key": "another"}) == []
    assert [change.key for change in changes(kept, was | {"data.key": "label"})] == ["data.key"]
    assert [change.key for change in changes(kept, was | {"model.width": 9})] == ["model.width"]


def test_no_file_of_a_run_has_a_secret_when_its_command_has(tmp_path: Path) -> None:
    """The event log, and what is read from it: listeners (loggers), the report in HTML. Reports
    are private files, whatever the umask is."""
    run = tmp_path / "run"
    events, heard = Events(run, run="run", attempt=1), []
    events.listeners.append(lambda event, facts: heard.append(facts))
    command = ["python", "train.py", "--api-key", SECRET, f"--db=postgres://me:{SECRET}@h/d"]
    events.emit("run.started", options={"command": command, "horovodrun": []}, versions={})
    events.emit("worker.failed", error=f"login with token={SECRET} failed")
    events.emit("job.settings_differ", key="training.lr", holds="run", run_value=1, given=2)
    assert SECRET not in (run / EVENTS_FILE).read_text() and SECRET not in str(heard)
    assert read_events(run)[0]["options"]["command"][:4] == [*command[:3], "***"]
    assert read_events(run)[2]["key"] == "training.lr"
    page = tmp_path / "report.html"
    umask = os.umask(0)
    try:
        assert main(["report", str(run), "--html", str(page)]) == 0
    finally:
        os.umask(umask)
    assert SECRET not in page.read_text()
    assert stat.S_IMODE(page.stat().st_mode) == 0o600


def test_weights_and_biases_gets_no_secret_of_the_command_line(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It collects sys.argv by itself."""
    pytest.importorskip("wandb")
    from elastic_trainer.loggers import Run, WandB

    monkeypatch.setattr("sys.argv", ["train.py", "--api-key", SECRET])
    logger = WandB("project", offline=True, folder=tmp_path)
    logger.open(Run(id="0123456789abcdef", name="run", attempt=1, first=0, folder=None))
    logger.close()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files and not [path for path in files if SECRET.encode() in path.read_bytes()]
