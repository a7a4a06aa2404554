"""How the patched Horovod ends and begins NCCL's communicators, with an NCCL of the test's own.

The text between two marks of 14-nccl-ends-beside.patch needs no more than nccl.h. It is compiled
with an nccl.h whose calls print what they do, and wait for one another.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

import elastic_trainer.setup.recipe as recipe

PATCH = recipe.PATCHES / "14-nccl-ends-beside.patch"
NCCL = r"""
#pragma once
#include <atomic>
#include <cstdio>
#include <mutex>
#include <string>
#include <condition_variable>
struct Comm { const char* name; };
typedef Comm* ncclComm_t;
struct ncclUniqueId { int number; };
enum ncclResult_t { ncclSuccess, ncclSystemError };
struct Gate {  // closed until it is opened
  std::mutex mutex; std::condition_variable changed; bool is_open = false;
  void open() {
    { std::lock_guard<std::mutex> lock(mutex); is_open = true; }
    changed.notify_all();
  }
  void pass() {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [&] { return is_open; });
  }
};
inline Gate proxy, peer, given_up;
inline std::mutex printing;
inline void say(std::string text) {
  std::lock_guard<std::mutex> lock(printing); std::puts(text.c_str()); std::fflush(stdout);
}
inline ncclResult_t ncclGroupStart() { return ncclSuccess; }
inline ncclResult_t ncclCommAbort(ncclComm_t comm) {
  say(std::string("marked ") + comm->name);
  if (comm->name[0] == 'l') given_up.open();
  return ncclSuccess;
}
inline ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  say(std::string("destroyed ") + comm->name); return ncclSuccess;
}
inline ncclResult_t ncclGroupEnd() { proxy.pass(); say("freed"); return ncclSuccess; }
inline Comm late{"late"};
inline ncclResult_t ncclCommInitRank(ncclComm_t* comm, int, ncclUniqueId id, int) {
  if (id.number == 1) peer.pass();  // a peer that is frozen
  *comm = &late; return ncclSuccess;
}
"""
HEAD = ("chrono", "condition_variable", "functional", "memory", "mutex", "thread", "vector")
MAIN = r"""
int main() {
  Comm a{"a"}, b{"b"};
  auto& ends = nccl_ends();
  ends.Start({&a, &b}, false, 60000);
  say("told");
  say(ends.Await(20) ? "has ended" : "still ends");
  proxy.open();
  say(ends.Await(60000) ? "has ended" : "still ends");
  ends.Start({&a}, true, 60000);
  ends.Await(60000);
  ends.Start({}, false);

  ncclComm_t made = nullptr;
  std::atomic<bool> is_over{false}, has_device{false};
  auto set_device = [&] { has_device = true; };
  auto result = InitOrGiveUp(&made, 4, ncclUniqueId{0}, 0, set_device, [&] { return false; });
  say(result == ncclSuccess && made == &late && has_device ? "made" : "not made");
  made = nullptr;
  std::thread([&] { is_over = true; }).detach();  // horovod_shutdown()
  result = InitOrGiveUp(&made, 4, ncclUniqueId{1}, 0, [] {}, [&] { return is_over.load(); });
  say(result == ncclSystemError && made == nullptr ? "given up" : "made");
  peer.open();  // it goes on: what is made now belongs to nobody
  given_up.pass();
}
"""


def added(patch: Path) -> str:
    """Return the lines between the marks."""
    lines = [line[1:] for line in patch.read_text().splitlines() if line.startswith("+")]
    begin, end = (next(at for at, line in enumerate(lines) if line.startswith(f"// {mark} of the "
                                                                              f"lifetime"))
                  for mark in ("begin", "end"))
    return "\n".join(lines[begin:end])


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler")
def test_the_waiting_threads_learn_of_a_loss_before_ncclcommabort_ends(tmp_path: Path) -> None:
    """All communicators are marked before one is freed, and the next one waits for that, with a
    limit. A communicator whose peer is frozen is given up, and aborted if it is made later."""
    (tmp_path / "nccl.h").write_text(NCCL)
    source = tmp_path / "lifetime.cc"
    source.write_text("".join(f"#include <{name}>\n" for name in HEAD) + "#include \"nccl.h\"\n"
                      + added(PATCH) + MAIN)
    subprocess.run(["g++", "-std=c++17", "-Wall", "-Werror", "-pthread", source, "-o",
                    tmp_path / "lifetime"], check=True, timeout=300)
    done = subprocess.run([tmp_path / "lifetime"], check=True, timeout=60, capture_output=True,
                          text=True)
    assert done.stdout.split("\n") == [
        "marked a", "marked b", "told", "still ends", "freed", "has ended", "destroyed a", "freed",
        "made", "given up", "marked late", ""]
