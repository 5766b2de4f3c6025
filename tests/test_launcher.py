"""The pure parts of installing and launching: checks, options, config merge, reading a failed log."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

import server_config
from checks import CheckError, check_disk, check_platform, check_ports, check_python, check_shm, free_ports
from serve import parse_arguments
from server_config import build_config, merge_config, read_config
from server_log import explain_failure
from server_options import ServerOptions, command
from server_processes import SHM_PREFIX_FILE, clean_run, end_session, session_pids
from triton_install import TritonInstall, installed_folder, installed_wheel

ROOT = Path(__file__).resolve().parent.parent

# ---------------------------------------------------------------------- checks


@pytest.mark.parametrize("version", [(3, 10), (3, 11), (3, 12), (3, 13)])
def test_supported_pythons_pass(version):
    check_python(version)


@pytest.mark.parametrize("version", [(2, 7), (3, 9), (3, 14), (4, 0)])
def test_unsupported_pythons_are_refused_with_the_range(version):
    with pytest.raises(CheckError, match=rf"Python {version[0]}\.{version[1]} .*3\.10 to 3\.13.*PYTHON="):
        check_python(version)


@pytest.mark.parametrize(
    ("system", "machine"), [("darwin", "arm64"), ("win32", "AMD64"), ("linux", "armv7l")]
)
def test_unsupported_systems_are_refused(system, machine):
    with pytest.raises(CheckError, match=machine):
        check_platform(system, machine)


def test_too_little_disk_or_shared_memory_is_refused_with_both_numbers(tmp_path):
    check_disk(tmp_path, 1)
    check_shm(1, tmp_path)
    with pytest.raises(CheckError, match=r"GB free, 1000000\.0 GB"):
        check_disk(tmp_path, 10**15)
    with pytest.raises(CheckError, match=r"MB free and \d+ MB are needed.*--shm-size"):
        check_shm(10**15, tmp_path)
    with pytest.raises(CheckError, match="is missing"):
        check_shm(1, tmp_path / "none")


def test_a_taken_port_is_named_with_the_variable_that_changes_it():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(CheckError, match=f"port {port} on 127.0.0.1 is in use.*GRPC_PORT="):
            check_ports("127.0.0.1", {"HTTP_PORT": free_ports(1)[0], "GRPC_PORT": port})


def test_free_ports_are_distinct_and_pass_the_check():
    ports = free_ports(3)
    assert len(set(ports)) == 3
    check_ports("127.0.0.1", dict(zip("abc", ports, strict=True)))


def test_equal_and_impossible_ports_are_refused():
    with pytest.raises(CheckError, match="HTTP_PORT are both 9000"):
        check_ports("127.0.0.1", {"HTTP_PORT": 9000, "GRPC_PORT": 9000})
    with pytest.raises(CheckError, match="70000 is not a port; allowed: 1 to 65535"):
        check_ports("127.0.0.1", {"HTTP_PORT": 70000})


# ---------------------------------------------------------------------- options and config


def test_arguments_win_over_the_environment_and_empty_variables_count_as_unset():
    env = {"HTTP_PORT": "9100", "GRPC_PORT": "", "TARGET": "some/model", "ANGELSPEC_CONFIG": "a.yaml"}
    arguments = parse_arguments(["--target", "other/model"], env)
    assert (arguments.http_port, arguments.grpc_port, arguments.metrics_port) == (9100, 8001, 8002)
    assert (arguments.target, arguments.config) == ("other/model", "a.yaml")
    assert parse_arguments([], {**env, "CONFIG": "b.yaml"}).config == "b.yaml"


def make_model(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").touch()


def test_target_and_drafter_override_the_file():
    user = {"target": "a/b", "num_draft_tokens": 7, "drafter": "ngram"}
    assert merge_config(user, "", "") == user
    assert merge_config(user, "c/d", "none") == {**user, "target": "c/d", "drafter": "none"}


def test_a_drafter_that_is_a_model_becomes_the_draft_model(tmp_path, monkeypatch):
    expected = {"draft_model": "some/small", "drafters": "ngram,draft_model", "drafter": "draft_model"}
    assert merge_config({}, "org/id", "some/small") == {**expected, "target": "org/id"}
    monkeypatch.chdir(tmp_path)
    make_model(Path("small"))
    assert merge_config({}, "", "small")["draft_model"] == str(tmp_path / "small")
    assert merge_config({"drafters": "draft_model"}, "", "some/small")["drafters"] == "draft_model"


def test_a_folder_of_a_trained_drafter_is_served_as_what_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_model(Path("mine"))
    Path("mine/config.json").write_text('{"architectures": ["AngelSpecDrafter"], "drafter": {"kind": "mtp"}}')
    options = merge_config({"target": "org/id"}, "", "mine")
    assert options == {
        "target": "org/id",
        "mtp": str(tmp_path / "mine"),
        "drafters": "ngram,mtp",
        "drafter": "mtp",
    }


def test_the_default_target_brings_the_drafters_trained_for_it(tmp_path, monkeypatch):
    monkeypatch.setattr(server_config, "BUNDLED", tmp_path / "weights")
    for kind in ("dfly", "mtp"):
        make_model(tmp_path / "weights" / kind)
    make_model(tmp_path / "weights" / "notes")  # no drafter's name
    paths = {kind: str(tmp_path / "weights" / kind) for kind in ("dfly", "mtp")}
    everything = {**paths, "drafters": "ngram,dfly,mtp"}
    assert merge_config({}, "", "") == everything
    assert merge_config({}, "", "ngram") == {**everything, "drafter": "ngram"}
    assert merge_config({"drafter": "none"}, "", "dfly") == {**everything, "drafter": "dfly"}
    assert merge_config({"mtp": "org/mtp"}, "", "")["mtp"] == "org/mtp"
    assert merge_config({"drafters": "ngram"}, "", "") == {"drafters": "ngram"}
    assert merge_config({"drafters": "ngram"}, "", "mtp") == {
        "drafters": "ngram,mtp",
        "mtp": paths["mtp"],
        "drafter": "mtp",
    }
    assert merge_config({}, "org/id", "") == {"target": "org/id"}, "they fit no other target"


def test_local_folders_become_absolute_and_missing_ones_are_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_model(Path("models/mine"))
    assert merge_config({"target": "models/mine"}, "", "")["target"] == str(tmp_path / "models/mine")
    assert merge_config({}, "org/id", "")["target"] == "org/id"
    for missing in ("./none", "/no/such/folder", "~/no-such-folder"):
        with pytest.raises(CheckError, match=f"target: there is no folder {missing}"):
            merge_config({}, missing, "")
    with pytest.raises(CheckError, match="target: models is no model folder: it has no config"):
        merge_config({}, "models", "")


def test_the_merged_config_is_checked_before_anything_starts(tmp_path):
    path = tmp_path / "user.yaml"
    path.write_text(yaml.safe_dump({"max_num_seqs": 3, "drain_timeout": 5}))
    options, checked = build_config(str(path), "org/id", "none")
    assert options == {"max_num_seqs": 3, "drain_timeout": 5, "target": "org/id", "drafter": "none"}
    assert (checked.max_num_seqs, checked.drain_timeout, checked.drafter) == (3, 5.0, "none")
    path.write_text("max_num_seq: 3")
    with pytest.raises(CheckError, match="CONFIG: unknown option 'max_num_seq'; did you mean 'max_num_seqs'"):
        build_config(str(path), "org/id", "")
    with pytest.raises(CheckError, match="unknown drafter 'nonsense'; known: ngram"):
        build_config("", "org/id", "nonsense")


def test_a_trained_drafter_needs_the_option_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "user.yaml"
    path.write_text("drafters: ngram,dfly,mtp\ndfly: made/dfly")
    make_model(Path("made/dfly"))
    with pytest.raises(CheckError, match="drafters: 'mtp' needs mtp, the id or folder of its checkpoint"):
        build_config(str(path), "org/id", "dfly")
    path.write_text("drafters: ngram,dfly,mtp\ndfly: made/dfly\nmtp: org/mtp")
    options, checked = build_config(str(path), "org/id", "dfly")
    assert (options["dfly"], options["mtp"]) == (str(tmp_path / "made/dfly"), "org/mtp")
    assert (checked.drafter_names, checked.drafter) == (("ngram", "dfly", "mtp"), "dfly")
    path.write_text("drafters: eagle3\neagle3: ./none")
    with pytest.raises(CheckError, match=r"eagle3: there is no folder \./none"):
        build_config(str(path), "org/id", "eagle3")


@pytest.mark.parametrize("content", ["- a\n- b", "just text", "a: [", "\xff"])
def test_a_file_that_is_no_config_is_refused(tmp_path, content):
    path = tmp_path / "user.yaml"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(CheckError, match="CONFIG"):
        read_config(str(path))


def test_the_server_listens_on_loopback_and_keeps_its_admin_interfaces_closed():
    line = command(ServerOptions(), TritonInstall(Path("/t/bin"), Path("/t/backends")), "prefix-")
    for kind in ("http", "grpc", "metrics"):
        assert f"--{kind}-address=127.0.0.1" in line
    for flag in ("--http-restricted-api", "--grpc-restricted-protocol"):
        (value,) = [item for item in line if item.startswith(flag)]
        assert "shared-memory,model-repository,trace,logging:" in value
    other = command(ServerOptions(), TritonInstall(Path("/t/bin"), Path("/t/backends")), "prefix-")
    assert line != other, "the secret differs from run to run"


# ---------------------------------------------------------------------- where the server is


def test_the_wheel_gives_a_backend_for_the_running_python(tmp_path):
    install = installed_wheel(tmp_path / "backends")
    assert install.binary.is_file()
    stub = install.backends / "python" / "triton_python_backend_stub"
    assert f"{sys.version_info[0]}.{sys.version_info[1]}" in str(stub.resolve())
    assert (install.backends / "python" / "triton_python_backend_utils.py").is_file()
    env = install.environment({"PATH": "/usr/bin", "LD_LIBRARY_PATH": "/mine", "PYTHONHOME": "/x"})
    assert env["LD_LIBRARY_PATH"].split(":")[-1] == "/mine"
    assert env["PATH"].split(":") == [str(Path(sys.executable).parent), "/usr/bin"]
    assert "PYTHONHOME" not in env


def test_an_installation_folder_is_used_as_it_is(tmp_path):
    with pytest.raises(CheckError, match="no tritonserver"):
        installed_folder(tmp_path)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "tritonserver").touch()
    install = installed_folder(tmp_path)
    assert install.backends == tmp_path / "backends"
    assert "LD_LIBRARY_PATH" not in install.environment({})


# ---------------------------------------------------------------------- failures and leftovers


def test_a_model_that_cannot_be_loaded_is_explained_without_its_traceback():
    log = """I1129 17:15:03.6 1 server.cc:674] "whatever"
E1129 17:15:03.7 1 model_lifecycle.cc:642] "failed to load 'target' version 1: Internal: ConfigError: x"
error: creating server: Invalid argument - load failed for model 'target': version 1 is at \
UNAVAILABLE state: Internal: ConfigError: dtype: must be bfloat16
or float32, got 'int4'

At:
  /some/path/model.py(6): initialize
;
"""
    expected = "model 'target' cannot be loaded: dtype: must be bfloat16 or float32, got 'int4'"
    assert explain_failure(log, 1) == expected


def test_other_failures_show_the_signal_or_the_last_errors():
    assert "SIGKILL; was the memory exhausted?" in explain_failure("whatever", -9)
    log = 'E1 cuda.cc:1] "CudaDriverHelper"\nE2029 1 grpc.cc:5] "failed to start GRPC: in use"\nI1 x] "bye"'
    assert explain_failure(log, 1) == "tritonserver stopped: failed to start GRPC: in use"
    assert explain_failure("a\nb\n", 127) == "tritonserver stopped: a; b"
    assert explain_failure("", 1) == "tritonserver stopped: it said nothing"


def test_cleaning_a_run_takes_its_own_things_only(tmp_path):
    segment = Path(f"/dev/shm/angelspec-test-{os.getpid()}-segment")
    segment.touch()
    (tmp_path / SHM_PREFIX_FILE).write_text(f"angelspec-test-{os.getpid()}-")
    (tmp_path / "backends" / "python").mkdir(parents=True)
    for name in ("drain", "config.yaml", "server.log", "notes.txt"):
        (tmp_path / name).touch()
    clean_run(tmp_path)
    clean_run(tmp_path)
    assert not segment.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "server.log"]


def test_a_session_is_ended_with_all_its_processes():
    leader = subprocess.Popen(
        ["bash", "-c", "trap '' TERM; sleep 60 & setsid -w true; wait"], start_new_session=True
    )
    end_session(leader.pid, grace=0.2)
    assert leader.wait(5) == -signal.SIGKILL
    end_session(leader.pid, grace=5.0)  # returns at once: nobody is left


def test_a_child_dies_with_its_parent(tmp_path):
    code = f"""
import subprocess, sys, os, time
sys.path.insert(0, {str(ROOT / "scripts")!r})
from server_processes import die_with_parent
child = subprocess.Popen(["sleep", "60"], start_new_session=True, preexec_fn=die_with_parent(os.getpid()))
print(child.pid, flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert Path(f"/proc/{child}").exists()
        parent.kill()
    deadline = time.monotonic() + 10
    while any(session_pids(child)):
        assert time.monotonic() < deadline, f"process {child} outlived its parent"
        time.sleep(0.02)
