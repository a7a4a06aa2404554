"""The supply chain: what is installed is taken by its hash, its licence is known, an image says
what it holds."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "deploy"
sys.path.insert(0, str(DEPLOY))
import hashes  # noqa: E402
import sbom  # noqa: E402
from hashes import Wanted  # noqa: E402

from elastic_trainer.setup import recipe  # noqa: E402

sys.path.pop(0)

LISTED = (DEPLOY / "hashes.txt").read_text()
LICENCES = dict(line.split("  ") for line in (DEPLOY / "licences.txt").read_text().splitlines())
LINE = re.compile(r"[0-9a-f]{64}  [A-Za-z0-9_.+]+-[A-Za-z0-9_.+!]+(-[A-Za-z0-9_.]+){3}\.whl")
X, Y = "a" * 64, "b" * 64


def all_pins() -> set[str]:
    """Return every `name==version` of constraints.txt."""
    return set().union(*(pins_for(python) for python in hashes.PYTHONS))


def pins_for(python: str) -> set[str]:
    return {hashes._pin(*pin.split("==")) for pin in hashes.pinned(hashes.constraints(), python)}


def installed() -> Iterator[importlib.metadata.Distribution]:
    """Yield the packages of this environment but ours, if deploy/install.sh has made it."""
    if not (Path(sys.prefix) / "install.log").exists():
        pytest.skip(f"{sys.prefix} was not made by deploy/install.sh.")
    if pin_of(importlib.metadata.distribution("torch")) not in all_pins():
        pytest.skip("this torch, and what it brings, is not the pinned one.")
    # Not sys.path: a test that imports setuptools adds the copies that it brings.
    folders = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    for one in importlib.metadata.distributions(path=folders):
        if one.metadata["Name"] != "elastic-trainer":
            yield one


def pin_of(one: importlib.metadata.Distribution) -> str:
    return str(hashes._pin(one.metadata["Name"], one.version.partition("+")[0]))


# --- hashes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("python", hashes.PYTHONS)
def test_every_pinned_package_has_a_hash(python: str) -> None:
    """But for Horovod: recipe.py has its source's."""
    known = hashes.listed(LISTED)
    assert pins_for(python) - known.keys() == {"horovod==0.28.1"}
    assert re.fullmatch("horovod==0.28.1 --hash=sha256:[0-9a-f]{64}", recipe.SOURCES)


@pytest.mark.parametrize("line", [recipe.SETUPTOOLS, recipe.CMAKE, *recipe.TOOLKIT])
def test_the_tools_of_the_build_are_the_pinned_ones(line: str) -> None:
    """With all of their hashes: a user's environment has neither constraints.txt nor hashes.txt."""
    pin, *digests = line.split(" --hash=sha256:")
    assert pin in all_pins() and set(digests) == set(hashes.listed(LISTED)[pin])


def test_the_list_has_only_what_is_pinned() -> None:
    """In sha256sum's format, sorted, wheels alone; a torch for one processor is a version of the
    pinned one."""
    lines = LISTED.splitlines()
    assert [line for line in lines if not LINE.fullmatch(line)] == []
    assert sorted(lines, key=lambda line: line[66:].lower()) == lines
    assert {pin.partition("+")[0] for pin in hashes.listed(LISTED)} <= all_pins()


def test_what_is_installed_here_is_pinned() -> None:
    """What comes along with something else included."""
    assert {pin_of(one) for one in installed()} <= pins_for(f"3.{sys.version_info[1]}")


def test_what_has_no_hash_is_refused_by_name() -> None:
    """A package, or a version of one, that nobody has looked at."""
    known = {"numpy==2.4.6": [X, Y]}
    assert hashes.requirements([Wanted("numpy==2.4.6", Y)], known) == [
        f"numpy==2.4.6 --hash=sha256:{X} --hash=sha256:{Y}"]
    with pytest.raises(SystemExit,
                       match=r"no hash of evil==1, numpy==2\.4\.7\. Name the version in"):
        hashes.requirements(
            [Wanted("numpy==2.4.6", X), Wanted("evil==1", X), Wanted("numpy==2.4.7", X)], known)


def test_another_file_of_a_listed_version_is_refused_though_the_index_vouches_for_it() -> None:
    """Also beside a torch of another index."""
    known = {"numpy==2.4.6": [Y]}
    for uses_index in (False, True):
        lines = hashes.requirements([Wanted("numpy==2.4.6", X)], known, uses_index)
        assert lines == [f"numpy==2.4.6 --hash=sha256:{Y}"]


def test_a_torch_of_another_index_has_the_hash_of_that_index_and_a_message(
        capsys: pytest.CaptureFixture[str]) -> None:
    """So have its dependencies when they are asked for. No other package has."""
    torch, brought = Wanted("torch==2.13.0+cu126", X), Wanted("nvidia-cublas-cu12==12.6.4.1", X)
    assert hashes.requirements([torch], {}) == [f"{torch.pin} --hash=sha256:{X}"]
    assert hashes.requirements([brought], {}, uses_index=True) == [
        f"{brought.pin} --hash=sha256:{X}"]
    output = capsys.readouterr().err
    assert torch.pin in output and brought.pin in output
    for wanted, uses_index in ((brought, False), (Wanted("torch==2.14.0",
                                                      X), False), (Wanted(torch.pin), True)):
        with pytest.raises(SystemExit, match=f"no hash of {re.escape(wanted.pin)}"):
            hashes.requirements([wanted], {}, uses_index)


def test_a_file_of_this_machine_is_used_and_printed_when_it_is_not_listed(
        capsys: pytest.CaptureFixture[str]) -> None:
    """A user who can configure pip owns the machine. For a listed file there is no message."""
    assert hashes.requirements([Wanted("numpy==2.4.6", Y, True)], {"numpy==2.4.6": [Y]}) == [
        f"numpy==2.4.6 --hash=sha256:{Y}"]
    assert capsys.readouterr().err == ""
    assert hashes.requirements([Wanted("numpy==2.4.6", X, True)], {"numpy==2.4.6": [Y]}) == [
        f"numpy==2.4.6 --hash=sha256:{Y} --hash=sha256:{X}"]
    assert "no hash of numpy==2.4.6. The hash of its index is used" in capsys.readouterr().err


def test_a_plan_of_pip_lists_what_is_here_and_leaves_this_project_out() -> None:
    """As pip writes it (`--report`)."""
    def item(name: str, **info: object) -> dict[str, object]:
        return {"metadata": {"name": name, "version": "1.0"}, "download_info": info}

    far = item("A_b", url="https://x/a.whl", archive_info={"hashes": {"sha256": X}})
    here = item("c", url="file:///x/c.whl", archive_info={"hashes": {"sha256": Y}})
    ours = item("elastic-trainer", url="file:///x", dir_info={"editable": True})
    assert list(hashes.planned({"install": [far, here, ours]})) == [
        Wanted("a-b==1.0", X), Wanted("c==1.0", Y, True)]


def test_pip_refuses_a_file_with_another_hash(tmp_path: Path) -> None:
    """What install.sh hands to pip is enforced by pip: a changed file of a pinned version is not
    installed."""
    wanted = hashes.requirements([Wanted("six==1.17.0")], {"six==1.17.0": [X]})
    (tmp_path / "wanted.txt").write_text("\n".join(wanted))
    wheel = tmp_path / "six-1.17.0-py2.py3-none-any.whl"
    wheel.write_bytes(b"not what was looked at")
    done = subprocess.run([sys.executable, "-m", "pip", "--isolated", "install", "--no-index",
                           "--find-links", tmp_path, "--no-deps", "--require-hashes", "--target",
                           tmp_path / "there", "--requirement", tmp_path / "wanted.txt"],
                          capture_output=True, text=True)
    assert done.returncode != 0 and "DO NOT MATCH THE HASHES" in done.stderr
    assert not (tmp_path / "there").exists()


def test_no_index_is_asked_but_by_hash() -> None:
    """install.sh calls pip for files of an index only through install_listed, or with a file of
    hashes; so does the set-up of Horovod, which besides installs the wheel that it has built.
    """
    text = (DEPLOY / "install.sh").read_text()
    calls = re.findall(r"^\s*pip (?:install|download|wheel).*(?:\\\n.*)*", text, re.M)
    free = [call.strip() for call in calls if "--require-hashes" not in call
            and "--dry-run" not in call and "--no-deps" not in call]
    assert free == [] and len(calls) == 2
    tree = ast.parse((ROOT / "elastic_trainer/setup/build.py").read_text())
    words = [[ast.unparse(word) for word in node.args] for node in ast.walk(tree)
             if isinstance(node, ast.Call) and ast.unparse(node.func) == "commands.pip"]
    words = [call for call in words if call[0] != "'uninstall'"]
    assert len(words) == 5 and all("'--no-deps'" in call for call in words)
    assert sorted(call[-1] for call in words
                  if "'--require-hashes'" not in call) == ["sources", "wheel"]


def test_what_the_plain_torch_brings_binds_no_other_build() -> None:
    """pip would take an older or another torch to meet it: it stands in a file of its own."""
    everywhere, nvidia = (path.read_text() for path in hashes.CONSTRAINTS)
    assert re.findall(r"^(?:nvidia-|cuda-|triton==).*", everywhere, re.M) == []
    assert re.findall(r"^(?!nvidia-|cuda-|triton==)\w.*", nvidia, re.M) == []


# --- licences -------------------------------------------------------------------------------------


def test_the_licence_of_every_pinned_package_is_listed() -> None:
    """Of nothing else. One has none: cuda-toolkit holds nothing but the names of NVIDIA's other
    packages."""
    assert LICENCES.keys() == all_pins()
    assert [pin for pin, output in LICENCES.items()
            if output in ("", "none")] == ["cuda-toolkit==13.0.3.0"]


def test_the_listed_licences_are_those_that_the_packages_declare() -> None:
    """As far as they are installed here."""
    assert {pin_of(one): LICENCES[pin_of(one)] for one in installed()} == {
        pin_of(one): hashes.licence(one.metadata.json) for one in installed()}


@pytest.mark.parametrize(("metadata", "output"), [
    ({"license_expression": "MIT", "license": "text"}, "MIT"),
    ({"license": "BSD-3-Clause", "classifier": ["License :: OSI Approved :: BSD License"]
      }, "BSD-3-Clause"),
    ({
        "license": "Permission is hereby granted " * 9,
        "classifier": ["License :: OSI Approved :: MIT License"]
    }, "MIT License"),
    ({
        "license": "Dual License",
        "classifier": ["License :: OSI Approved :: BSD License", "License :: X"]
    }, "BSD License, X"),
    ({"classifier": ["Programming Language :: C"]}, ""),
])
def test_a_licence_comes_from_the_first_field_that_has_it(metadata: dict[str, object],
                                                         output: str) -> None:
    """The expression, then a short field, then the classifiers; a field may have the whole text."""
    assert hashes.licence(metadata) == output


# --- the image ------------------------------------------------------------------------------------


def test_every_base_image_is_named_by_its_digest() -> None:
    """In arguments, in examples, and in FROM."""
    text = (ROOT / "Dockerfile").read_text()
    named = re.findall(r"(?:ARG |--build-arg )(?:BUILD_)?BASE=(\S+)|^FROM (\S+)", text, re.M)
    named = [one or other for one, other in named]
    bare = [one for one in named if not re.fullmatch(r"[a-z/]+:[\w.-]+@sha256:[0-9a-f]{64}", one)]
    assert bare == ["${BUILD_BASE}", "${BASE}"] and len(named) == 4


def test_the_image_has_what_it_is_installed_from() -> None:
    """What COPY names of deploy passes .dockerignore, and install.sh reads nothing else there, nor
    of our packages another one than that which COPY names before it is run.
    """
    text, sent = (ROOT / "Dockerfile").read_text(), (ROOT / ".dockerignore").read_text().split()
    copied = {word for line in re.findall("^COPY (.+)", text, re.M) for word in line.split()[:-1]
              if "deploy/" in word}
    assert {f"!{one}" for one in copied} == {one for one in sent if "deploy/" in one}
    read = set(re.findall(r"\$root/deploy/([\w.-]+)", (DEPLOY / "install.sh").read_text()))
    assert {f"deploy/{one}" for one in read} <= copied
    before = text.partition("deploy/install.sh \\\n")[0]
    folders = set(
        re.findall(r"\$root/(elastic_trainer/[\w/]+)", (DEPLOY / "install.sh").read_text()))
    assert folders == {"elastic_trainer/setup"
                       } <= {line.split()[1]
                             for line in re.findall("^COPY .+", before, re.M)}


def test_the_bill_of_materials_names_every_package_of_python_and_dpkg() -> None:
    """With purl and version, each once. tests/image holds an image's document against the
    schema."""
    if not shutil.which("dpkg-query"):
        pytest.skip("dpkg-query is not on this machine.")
    if not any(one.metadata["Name"] == "elastic-trainer"
               for one in importlib.metadata.distributions()):
        pytest.skip("elastic-trainer runs from a clone here and is not installed.")
    made = subprocess.run([sys.executable, "-B", DEPLOY / "sbom.py"], capture_output=True,
                          text=True, check=True)
    document = json.loads(made.stdout)
    assert (document["bomFormat"], document["specVersion"]) == ("CycloneDX", "1.6")
    assert document["metadata"]["component"]["purl"].startswith("pkg:pypi/elastic-trainer@")
    named = [one["bom-ref"] for one in document["components"]]
    assert len(set(named)) == len(named)
    assert set(named) >= {sbom.of_pypi(one.metadata["Name"], one.version) for one in installed()}
    assert [one["name"] for one in document["components"] if one["bom-ref"].startswith("pkg:pypi/")
            and not one["purl"].startswith(f"pkg:pypi/{one['name']}@")] == []
    states = subprocess.run(["dpkg-query", "--show", "--showformat=${db:Status-Abbrev}\n"],
                            capture_output=True, text=True, check=True).stdout.splitlines()
    assert sum(one.startswith("pkg:deb/") for one in named) == states.count("ii ")
    assert [one["name"] for one in document["components"]
            if "pypi" in one["bom-ref"] and "licenses" not in one] == []


def test_a_copyright_file_has_licences_only_if_it_is_machine_readable(tmp_path: Path) -> None:
    """Debian's format (DEP 5); each licence once. Others are prose."""
    file = tmp_path / "copyright"
    assert sbom.licences_of(file) == []
    file.write_text(
        "Format: https://x\n\nLicense: MIT\n\nFiles: a\nLicense: GPL-2+ \n\nLicense: MIT\n text\n")
    assert sbom.licences_of(file) == ["GPL-2+", "MIT"]
    file.write_text("This is free.\nLicense: see below\n")
    assert sbom.licences_of(file) == []


# --- the bucket -----------------------------------------------------------------------------------


def test_the_readme_names_every_object_of_the_bucket_that_machines_read_or_write() -> None:
    """In the table that says what becomes code: folders, and the files of a coordinator's own
    folder."""
    readme = (DEPLOY / "README.md").read_text()
    table = readme.partition("## What in the bucket becomes code")[2].partition("\n## ")[0]
    scripts = "".join(path.read_text() for path in (DEPLOY / "hosts").glob("*.sh"))
    policy = (DEPLOY / "terraform/fleet/iam.tf").read_text()
    objects = set(re.findall(r"(?:\$store|\$BUCKET/\$FLEET)/([a-z][\w.]*)", scripts))
    objects |= set(re.findall(r"local\.run}/([a-z][\w.]*)", policy))
    objects |= {f"boot/<coordinator>/{one}" for one in re.findall(r"\$boot/([\w.]+)", scripts)}
    assert {"code.tar.gz", "wheels", "boot/<coordinator>/release.tar.zst"} <= objects
    assert {one for one in objects if f"`NAME/{one}" not in table} == set()


# --- known vulnerabilities ------------------------------------------------------------------------

KNOWN = sbom.vulnerabilities()
STATES = {"resolved", "resolved_with_pedigree", "exploitable", "in_triage", "false_positive",
          "not_affected"}
JUSTIFICATIONS = {"code_not_present", "code_not_reachable", "requires_configuration",
                  "requires_dependency", "requires_environment", "protected_by_compiler",
                  "protected_at_runtime", "protected_at_perimeter",
                  "protected_by_mitigating_control"}


def test_the_page_about_security_and_the_analysis_in_an_image_have_one_source() -> None:
    """SECURITY.md has the table as it is printed, with its date, and names no other
    vulnerability."""
    page = (ROOT / "SECURITY.md").read_text()
    assert sbom.table() in page
    assert json.loads(sbom.VULNERABILITIES.read_text())["checked"] in page
    assert {*re.findall(r"CVE-\d+-\d+", page)} == {known["id"] for known in KNOWN}
    found = {sbom.of_pypi(known["package"], "1"): {"name": known["package"]} for known in KNOWN}
    analysed = list(sbom.analysed(found))
    assert [one["id"] for one in analysed] == [known["id"] for known in KNOWN]
    for one in analysed:
        assert one["analysis"]["detail"] in page.replace(" | no | ", " ")
        assert [ref["ref"] for ref in one["affects"]][0] in found


@pytest.mark.parametrize("known", KNOWN, ids=lambda known: known["id"])
def test_a_vulnerability_is_reached_or_not_and_has_a_reason(known: dict[str, str]) -> None:
    """In CycloneDX's words. A version that has it is not pinned, a patch that resolves it is there
    and names it."""
    assert re.fullmatch(r"CVE-20\d\d-\d{4,7}", known["id"])
    assert known["state"] in STATES and known["reached"] in ("no", "yes")
    assert (known["reached"] == "yes") == (known["state"] == "exploitable")
    assert (known["state"] == "not_affected") == ("justification" in known)
    assert known.get("justification", "code_not_present") in JUSTIFICATIONS
    versions = {pin.partition("==")[2] for pin in all_pins()
                if pin.partition("==")[0] == known["package"]}
    assert versions
    if known.get("justification") == "code_not_present":
        numbers = [tuple(map(int, re.findall(r"\d+", version)[:3])) for version in versions]
        assert min(numbers) >= tuple(map(int, known["fixed"].split(".")))
    if known["state"] == "resolved_with_pedigree":
        assert known["id"] in (recipe.PATCHES / known["patch"]).read_text()


def test_an_image_lists_the_vulnerabilities_of_what_it_holds() -> None:
    """With the patches that resolve them."""
    found = {one["bom-ref"]: one for one in sbom.of_python()}
    ids = [one["id"] for one in sbom.analysed(found)]
    assert {"CVE-2024-10190", "CVE-2026-31234", "CVE-2026-24747"} <= {*ids}
    (horovod,) = (one for one in found.values() if one["name"] == "horovod")
    resolved = {it["id"] for patch in horovod["pedigree"]["patches"] for it in patch["resolves"]}
    assert resolved == {"CVE-2024-10190", "CVE-2026-31234"}
