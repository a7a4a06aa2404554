#!/usr/bin/env bash
# deploy/install.sh [--dev]      --dev adds the test tools
#
# The one set-up: makes .venv with pinned packages, Horovod built from source and this project, editable.
# Scripts, CI, tests/run and the Dockerfile → here → .venv.
#
# What always holds:
# 1. A second call does nothing and costs milliseconds: a stamp in .venv holds a hash of what decides its contents.
# 2. What is missing on the machine is said before anything is done, all of it at once.
# 3. Horovod is built once per torch, Python and platform. Its wheel is kept in the user's cache, where it appears whole.
# 4. pip runs with --require-hashes and takes the wheels of hashes.txt alone: to build a package runs its code. Not
#    listed, because install.sh does not know the index: a torch for one processor (2.13.0+cu126) and what it brings.
#    The hash that its index says is taken, and that is said. So it is with files that lie on this machine.
# 5. Two calls at once wait for each other. Neither root nor ssh is needed. Everything said goes to stderr.
#
# Environment:
#   ELASTIC_TRAINER_VENV   where the virtual environment goes (.venv at the project root)
#   TORCH_SPEC             the torch to ask pip for (torch==2.13.0); e.g. torch==2.13.0+cpu, with pip's own
#                          PIP_EXTRA_INDEX_URL naming an index that has it
#   PYTHON                 the Python to make the environment with (the first of python3, python3.14 … 3.10 that will)
#   XDG_CACHE_HOME         the wheel is kept in elastic-trainer/wheels under it (~/.cache)
#
# Source: Horovod sets C++14 where torch >= 2.1 needs C++17: github.com/horovod/horovod, issue 3996, pull 3998
# (merged after 0.28.1, the last release).
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${ELASTIC_TRAINER_VENV:-$root/.venv}
[[ $venv == /* ]] || venv=$PWD/$venv
cache=~/.cache
cache=${XDG_CACHE_HOME:-$cache}/elastic-trainer/wheels
constraints=$root/deploy/constraints.txt
constraints_nvidia=$root/deploy/constraints-nvidia.txt
hashes=$root/deploy/hashes.txt

horovod=0.28.1
horovod_sha256=92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0
recipe=6                               # one more when build_horovod() changes: old wheels are then left alone
space_needed_mib=6144

say() { printf 'install: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

extras=examples
case ${1-} in
    '') ;;
    --dev) extras=examples,dev ;;
    *) die "unknown argument $1. Usage: deploy/install.sh [--dev]" ;;
esac

# ---- 1. the second call ----

fingerprint() {
    {
        printf '%s\n' "$root" "$venv"
        cat "$venv/pyvenv.cfg" "$constraints" "$constraints_nvidia" "$hashes" "$root"/deploy/{hashes.py,install.sh} \
            "$root"/{setup.cfg,pyproject.toml}
    } | sha256sum
}

is_installed() {   # the dev environment holds the plain one too
    [[ -x $venv/bin/python && -f $venv/pyvenv.cfg ]] || return 1
    local now stamp written spec
    now=$(fingerprint)
    for stamp in "$venv/.installed-examples,dev" "$venv/.installed-$extras"; do
        [[ -f $stamp ]] || continue
        { read -r written && read -r spec; } <"$stamp" || continue
        [[ $written == "$now" && ${TORCH_SPEC:-$spec} == "$spec" ]] && return 0
    done
    return 1
}

if is_installed; then exit 0; fi

# ---- 2. what the machine lacks ----

missing=()
python=

lacks() { missing+=("$*"); }   # the fact, the remedy

is_python_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; }

# Moved or copied environments count as absent: the scripts in them point at where they were.
is_venv_usable() {
    [[ -x $venv/bin/python ]] && is_python_new_enough "$venv/bin/python" &&
        "$venv/bin/python" -c 'import pip' 2>/dev/null && grep -qF "$venv" "$venv/bin/activate" 2>/dev/null
}

find_python() {
    if is_venv_usable; then
        python=$venv/bin/python
        return
    fi
    local candidate candidates=(python3 python3.14 python3.13 python3.12 python3.11 python3.10)
    if [[ ${PYTHON-} ]]; then candidates=("$PYTHON"); fi
    for candidate in "${candidates[@]}"; do
        if is_python_new_enough "$candidate"; then
            python=$(command -v "$candidate")
            "$python" -c 'import venv, ensurepip' 2>/dev/null ||
                lacks "$python has no venv module." "Install it, e.g. apt-get install python3-venv."
            return
        fi
    done
    lacks "Python 3.10 or newer is missing (tried ${candidates[*]})." \
        "Install one, or name it: PYTHON=/path/to/python3.11 deploy/install.sh."
}

platform() {
    "$python" -c 'import platform, sys, sysconfig
print(sys.implementation.cache_tag, sysconfig.get_platform(), "".join(platform.libc_ver()), sep="-")'
}

is_some_wheel_kept() { compgen -G "$cache/*-$(platform)-*/horovod-$horovod-*.whl" >/dev/null; }

check_build_tools() {
    command -v "${CXX:-c++}" >/dev/null ||
        lacks "A C++ compiler (${CXX:-c++}) is missing, and Horovod is built from source." \
            "Install one, e.g. apt-get install g++."
    command -v make >/dev/null ||
        lacks "make is missing, and Horovod is built from source." "Install it, e.g. apt-get install make."
    "$python" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' ||
        lacks "The headers of $python are missing, and Horovod is built from source." \
            "Install them, e.g. apt-get install python3-dev."
}

check_folder() {   # folder, what for, the variable that moves it
    local folder=$1 free_mib
    while [[ ! -d $folder ]]; do folder=$(dirname "$folder"); done
    [[ -w $folder ]] || lacks "$folder ($2) cannot be written by $(id -un)." "Set $3 to a folder that can."
    free_mib=$(df -Pm "$folder" | awk 'NR == 2 {print $4}')
    ((free_mib >= space_needed_mib)) ||
        lacks "$folder ($2) has $free_mib MiB free, where $space_needed_mib MiB are needed." \
            "Free some, or set $3 to a folder on another disk."
}

stop_if_missing() {
    ((${#missing[@]} == 0)) && return
    local sentence
    for sentence in "${missing[@]}"; do say "$sentence"; done
    exit 1
}

for tool in flock sha256sum tar; do
    command -v "$tool" >/dev/null || lacks "$tool is missing." "Install it, e.g. apt-get install util-linux coreutils tar."
done
find_python
if [[ $python ]] && ! is_some_wheel_kept; then check_build_tools; fi
# An environment that already holds torch needs little more.
if compgen -G "$venv/lib/python3*/site-packages/torch/version.py" >/dev/null; then space_needed_mib=1024; fi
check_folder "$(dirname "$venv")" "for the virtual environment" ELASTIC_TRAINER_VENV
check_folder "$cache" "for the built Horovod" XDG_CACHE_HOME
stop_if_missing

# ---- 3. the environment ----

take_lock() { flock -n "$1" || { say "waiting for another install to finish"; flock "$1"; }; }   # file descriptor

mkdir -p "$cache" "$(dirname "$venv")"
exec 8>"$venv.lock"
take_lock 8
if is_installed; then exit 0; fi      # by the one we waited for

if ! is_venv_usable; then
    say "making $venv with $python"
    "$python" -m venv --clear "$venv"
    python=$venv/bin/python
fi
rm -f "$venv"/.installed-*
log=$venv/install.log
: >"$log"

run() {
    printf '+ %s\n' "$*" >>"$log"
    "$@" >>"$log" 2>&1 || { tail -n 25 "$log" >&2; die "failed: $*. The lines above end its log, $log"; }
}

pip() { run "$python" -m pip --disable-pip-version-check --no-input "$@"; }

# Installs what hashes.py prints, and nothing else.
install_listed() {
    "$python" "$root/deploy/hashes.py" "$@" >"$venv/wanted.txt" || die "nothing of this was installed"
    if grep -q . "$venv/wanted.txt"; then
        pip install --no-deps --require-hashes --requirement "$venv/wanted.txt"
    fi
}

# Writes what pip would install for these words to plan.json, for install_listed. pip can have hashes required only for
# all that it installs, of pinned versions, so what is not installed yet is asked first.
plan() { pip install --dry-run --only-binary :all: --report "$venv/plan.json" "${pins[@]}" "$@"; }

pins=(--constraint "$constraints")
install_listed pins pip setuptools
# First and alone, by its plain spec: next to other packages pip would be free to look for another build.
spec=${TORCH_SPEC:-torch==2.13.0}
say "installing $spec"
plan --no-deps "$spec"
install_listed plan "$venv/plan.json"
torch=$("$python" -c 'from importlib.metadata import version; print(version("torch"))')
brought=()
case $torch in
    *+*) brought=(as-said) ;;          # of another index, which says what it brings
    *) pins+=(--constraint "$constraints_nvidia") ;;
esac
plan "torch==$torch"
install_listed plan "$venv/plan.json" "${brought[@]}"

# ---- 4. Horovod ----

read -r torch_version torch_cuda < <("$python" -W ignore -c \
    'import torch; print(torch.__version__, torch.version.cuda or "none")')

# Where torch looks for it too (torch.utils.cpp_extension), so that Horovod and we agree.
cuda_home() {
    local home=${CUDA_HOME:-}
    [[ $home ]] || home=$(dirname "$(dirname "$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)")")
    [[ -x $home/bin/nvcc ]] && printf '%s' "$home"
}

is_nccl_here() {
    local folder
    for folder in "${HOROVOD_NCCL_HOME:-/usr}/include" "${HOROVOD_NCCL_INCLUDE:-/usr/include}" "$1/include"; do
        [[ -f $folder/nccl.h ]] && return 0
    done
    return 1
}

gpu=gloo                               # gloo: CPU tensors only · cuda: GPU tensors too, through the CPU · nccl
if [[ $torch_cuda != none ]]; then
    if home=$(cuda_home); then
        export HOROVOD_CUDA_HOME=$home
        gpu=cuda
        if is_nccl_here "$home"; then gpu=nccl; fi
    fi
    [[ $gpu == nccl ]] ||
        say "torch is built for CUDA $torch_cuda but nvcc or nccl.h is missing, so Horovod is built without NCCL." \
            "To have it, install the CUDA toolkit and libnccl-dev, delete $venv and run this again."
fi

cmake_for_horovod() {   # the machine's, if Horovod can use it: 3.13 or newer, but not 4
    local version
    version=$(cmake --version 2>/dev/null | awk 'NR == 1 {print $3}') || true
    case $version in
        3.[0-9].* | 3.1[0-2].*) ;;
        3.*) command -v cmake; return ;;
    esac
    install_listed pins cmake
    printf '%s\n' "$venv/bin/cmake"
}

replace() {   # in a file, literally: what, by what
    local text
    text=$(<"$1")
    [[ $text == *"$2"* ]] || die "$1 has no '$2', so it is not the Horovod $horovod this was written for."
    printf '%s\n' "${text//"$2"/"$3"}" >"$1"
}

mend_sources() {
    replace "$1/CMakeLists.txt" 'set(CMAKE_CXX_STANDARD 14)' 'set(CMAKE_CXX_STANDARD 17)'
    replace "$1/horovod/torch/CMakeLists.txt" 'set(CMAKE_CXX_STANDARD 14)' 'set(CMAKE_CXX_STANDARD 17)'
    # It takes the path of its sources for a regular expression. With a + in that path, as in the name of our cache's
    # folders, the library lands outside the package and the wheel looks whole but holds no usable Horovod.
    # shellcheck disable=SC2016  # CMake's variable
    replace "$1/cmake/Utilities.cmake" 'REGEX REPLACE "${PROJECT_SOURCE_DIR}(/)?"' 'REPLACE "${PROJECT_SOURCE_DIR}/"'
    mend_cycle "$1/horovod/common"
    mend_broken_pairs "$1/third_party/gloo/gloo/transport/tcp/pair.cc"
    mend_host_name "$1"
    mend_init "$1/horovod/common/operations.cc"
    mend_meeting "$1"
    mend_listeners "$1/third_party/gloo/gloo/transport/tcp"
}

# Its background thread sleeps for the cycle time between two negotiations, also when a tensor arrives in the meantime
# (operations.cc, RunLoopOnce). Short cycles then burn the cores (a tenth of one for each worker at 5 ms, measured), long
# ones delay every operation. Mended, it sleeps only while there is nothing to do: world.py chooses long cycles then,
# and knows by the symbol whether this Horovod is one that was mended.
mend_cycle() {
    replace "$1/tensor_queue.h" '#include <iostream>' '#include <atomic>
#include <chrono>
#include <condition_variable>
#include <iostream>'
    replace "$1/tensor_queue.h" '  void RemoveJoinTensor();' '  void RemoveJoinTensor();

  void SleepWhileEmpty(std::chrono::steady_clock::duration longest,
                       const std::atomic_bool& shut_down);

  void Wake();'
    replace "$1/tensor_queue.h" '  mutable std::mutex mutex_;' '  mutable std::mutex mutex_;

  std::condition_variable arrived_;'
    replace "$1/tensor_queue.cc" 'message_queue_.push(std::move(message));
  return Status::OK();' 'message_queue_.push(std::move(message));
  arrived_.notify_one();
  return Status::OK();'
    replace "$1/tensor_queue.cc" 'message_queue_.push(std::move(messages[i]));
  }
' 'message_queue_.push(std::move(messages[i]));
  }
  arrived_.notify_one();
'
    replace "$1/tensor_queue.cc" '// Execute callback for each tensor and clear tensor queue' 'void TensorQueue::SleepWhileEmpty(
    std::chrono::steady_clock::duration longest,
    const std::atomic_bool& shut_down) {
  std::unique_lock<std::mutex> lock(mutex_);
  arrived_.wait_for(lock, longest, [&] {
    return !tensor_table_.empty() || shut_down.load();
  });
}

void TensorQueue::Wake() {
  std::lock_guard<std::mutex> guard(mutex_);
  arrived_.notify_one();
}

// Execute callback for each tensor and clear tensor queue'
    replace "$1/operations.cc" 'std::this_thread::sleep_for(sleep_duration);' \
        'state.process_set_table.Get(0).tensor_queue.SleepWhileEmpty(
        sleep_duration, state.shut_down);'
    replace "$1/operations.cc" '    horovod_global.shut_down = true;
    horovod_global.background_thread.join();' '    horovod_global.shut_down = true;
    horovod_global.process_set_table.Get(0).tensor_queue.Wake();
    horovod_global.background_thread.join();'
    replace "$1/operations.cc" 'int horovod_is_initialized() {' '// Its name tells that the background thread wakes when a tensor arrives.
void horovod_wakes_on_arrival() {}

int horovod_is_initialized() {'
}

# When a connection breaks, Gloo wakes who waits for what has not begun, and not who waits for what is half sent or half
# received (pair.cc, signalException): a death in the middle of an exchange held everybody up for Gloo's whole time-out.
mend_broken_pairs() {
    replace "$1" '      op.buf->signalException(ex);
    }
  }
' '      op.buf->signalException(ex);
    }
    NonOwningPtr<UnboundBuffer> sending(op.ubuf);
    if (sending) {
      sending->signalException(ex);
    }
  }

  NonOwningPtr<UnboundBuffer> receiving(rx_.ubuf);
  if (receiving) {
    receiving->signalException(ex);
  }
'
}

# A machine whose own name does not resolve: Gloo checks getaddrinfo for -1, which it never returns, follows the list that
# was not filled, and the process dies of SIGSEGV (device.cc, lookupAddrForHostname). It looks up the name although an
# interface is given, because the connections that training uses do not get it (gloo_context.cc, InitializeForProcessSet).
mend_host_name() {
    replace "$1/third_party/gloo/gloo/transport/tcp/device.cc" '  GLOO_ENFORCE_NE(rv, -1);
  struct addrinfo* rp;' '  GLOO_ENFORCE(
    rv == 0,
    "Unable to find address for ",
    attr.hostname,
    ", the name of this machine: ",
    gai_strerror(rv),
    ". Give the interface with HOROVOD_GLOO_IFACE.");
  struct addrinfo* rp;'
    replace "$1/horovod/common/gloo/gloo_context.cc" '  attr device_attr;
  device_attr.iface = gloo_iface_;
  device_attr.ai_family = AF_UNSPEC;
  auto dev = CreateDevice(device_attr);

  global_ctx = global_context.ctx;' '  attr device_attr;
  gloo_iface_ = global_context.gloo_iface_;
  device_attr.iface = gloo_iface_;
  device_attr.ai_family = AF_UNSPEC;
  auto dev = CreateDevice(device_attr);

  global_ctx = global_context.ctx;'
}

# An exception while the peers connect leaves the background thread uncaught and aborts the process (F1 in driver.py).
# Mended, hvd.init() fails, as it does already when process sets cannot be made, and can be called again.
mend_init() {
    replace "$1" '    global_gloo_context.Initialize(ParseGlooIface());
  }
  if (state.control_operation == LibType::GLOO) {
    // Initializes global controller
    state.process_set_table.Initialize(global_gloo_context);
  }
' '    try {
      global_gloo_context.Initialize(ParseGlooIface());
      if (state.control_operation == LibType::GLOO) {
        // Initializes global controller
        state.process_set_table.Initialize(global_gloo_context);
      }
    } catch (const std::exception& ex) {
      init_error = ex.what();
      LOG(ERROR) << "Horovod could not be initialized: " << ex.what();
      state.process_set_table.Get(0).Finalize(SHUT_DOWN_ERROR);
      // Not Finalize(): after that Horovod asks its own driver for a rank.
      global_gloo_context.global_ctx.reset();
      global_gloo_context.ctx.reset();
      global_gloo_context.local_ctx.reset();
      global_gloo_context.cross_ctx.reset();
      state.initialization_failed = true;
      return;
    }
  }
'
    replace "$1" 'bool RunLoopOnce(HorovodGlobalState& state);
' 'bool RunLoopOnce(HorovodGlobalState& state);

// Why the last initialization failed. Read when initialization_failed is set.
std::string init_error;
'
    replace "$1" '    horovod_global.initialization_done = false;
    horovod_global.background_thread =' '    horovod_global.initialization_done = false;
    horovod_global.initialization_failed = false;
    horovod_global.background_thread ='
    # Each of N waiting workers looked 1,000 times a second.
    replace "$1" '         !horovod_global.initialization_failed) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));' '         !horovod_global.initialization_failed) {
    std::this_thread::sleep_for(std::chrono::milliseconds(4));'
    replace "$1" 'int horovod_is_initialized() {' '// Its name tells that horovod_init() fails where it would have aborted.
const char* horovod_init_error() { return init_error.c_str(); }

int horovod_is_initialized() {'
}

# N members look for each other twice, once for each of two full meshes, and each asks for each other's name and twice for
# its addresses: 5 N² requests one behind another, 0.3 ms each at our rendezvous store. With HOROVOD_GLOO_MEET_AT_ONCE=1,
# which world.py sets where the store is ours and all members have this mend, a member puts its addresses and gets all of
# its peers' in one answer, which the store holds until they are there. The second mesh, for the same members, shares the
# first one's connections. Without the variable (plain horovodrun) nothing changes.
mend_meeting() {
    local context="$1/third_party/gloo/gloo/rendezvous/context.cc"
    replace "$context" '#include "gloo/common/logging.h"' '#include <chrono>
#include <cstdlib>
#include <thread>

#include "gloo/common/error.h"
#include "gloo/common/logging.h"'
    # The local rank of a pair, for which host names are exchanged, is read nowhere in Gloo or Horovod.
    replace "$context" '  std::vector<char> allBytes;
  int localRank = 0;
' '  const char* atOnce = std::getenv("HOROVOD_GLOO_MEET_AT_ONCE");
  if (atOnce != nullptr && std::string(atOnce) == "1") {
    auto meeting = dev->createContext(rank, size);
    meeting->setTimeout(getTimeout());
    std::vector<char> own;
    for (int i = 0; i < size; i++) {
      if (i != rank) {
        auto& pair = meeting->createPair(i);
        pair->setLocalRank(0);
        auto bytes = pair->address().bytes();
        own.insert(own.end(), bytes.begin(), bytes.end());
      }
    }
    std::vector<char> theirs;
    if (size > 1) {
      std::string key("at-once-" + std::to_string(size) + "-" + std::to_string(rank));
      store.set(key, own);
      const auto deadline = std::chrono::steady_clock::now() + getTimeout();
      while ((theirs = store.get(key)).size() != own.size()) {
        if (theirs.size() == 1) {
          GLOO_THROW_IO_EXCEPTION(GLOO_ERROR_MSG("A member of the world is gone"));
        }
        if (std::chrono::steady_clock::now() > deadline) {
          GLOO_THROW_IO_EXCEPTION(GLOO_ERROR_MSG("The addresses of the members are not there after ",
                                                 std::to_string(getTimeout().count()), " ms"));
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
      }
    }
    size_t at = 0;
    for (int i = 0; i < size; i++) {
      if (i != rank) {
        const size_t bytes = own.size() / (size - 1);
        meeting->getPair(i)->connect(
            std::vector<char>(theirs.begin() + at, theirs.begin() + at + bytes));
        at += bytes;
      }
    }
    device_ = dev;
    transportContext_ = std::move(meeting);
    return;
  }

  std::vector<char> allBytes;
  int localRank = 0;
'
    replace "$1/horovod/common/gloo/gloo_context.cc" '  attr device_attr;
  gloo_iface_ = global_context.gloo_iface_;' '  const auto at_once = std::getenv("HOROVOD_GLOO_MEET_AT_ONCE");
  if (registered_ranks.empty() && at_once != nullptr && std::string(at_once) == "1") {
    global_ctx = global_context.ctx;
    timeout_ = global_context.timeout_;
    hostname_ = global_context.hostname_;
    ctx = global_context.ctx;
    local_ctx = global_context.local_ctx;
    cross_ctx = global_context.cross_ctx;
    return;
  }

  attr device_attr;
  gloo_iface_ = global_context.gloo_iface_;'
    replace "$1/horovod/common/gloo/gloo_context.cc" '  store->Finalize();
' '  const auto at_once = std::getenv("HOROVOD_GLOO_MEET_AT_ONCE");
  if (at_once == nullptr || std::string(at_once) != "1") {
    store->Finalize();
  }
'
}

# While a world forms each member listens for each of its peers, on a port of its own, and takes the first connection for
# that peer's (pair.cc, handleListening): whoever else connects takes the peer's place, and the world does not form. Mended,
# with the variable of mend_meeting, a member accepts once it knows the peer's address, closes what does not come from
# there, and goes on listening. Who connects does so from the address that it has published: a machine with several
# networks has several. It also spares who connects a wait of up to 10 ms until the loop has let go of its listener.
mend_listeners() {
    replace "$1/pair.h" '  bool is_client_;' '  bool is_client_;

  // Whether the listener accepts only connections from the address of peer_.
  bool takesPeerOnly_ = false;'
    replace "$1/pair.cc" 'namespace {

// This reflects' 'namespace {

bool meetsAtOnce() {
  const char* value = std::getenv("HOROVOD_GLOO_MEET_AT_ONCE");
  return value != nullptr && std::string(value) == "1";
}

bool areOfOneMachine(
    const struct sockaddr_storage& a,
    const struct sockaddr_storage& b) {
  if (a.ss_family != b.ss_family) {
    return false;
  }
  if (a.ss_family == AF_INET) {
    return memcmp(
               &((const struct sockaddr_in*)&a)->sin_addr,
               &((const struct sockaddr_in*)&b)->sin_addr,
               sizeof(struct in_addr)) == 0;
  }
  return a.ss_family == AF_INET6 &&
      memcmp(
          &((const struct sockaddr_in6*)&a)->sin6_addr,
          &((const struct sockaddr_in6*)&b)->sin6_addr,
          sizeof(struct in6_addr)) == 0;
}

// Else it is of the listener: out of descriptors, or shut down, by which
// a meeting that nobody waits for any more is ended.
bool isOfTheConnection(int error) {
  switch (error) {  // accept(2)
    case EAGAIN:
    case EINTR:
    case ECONNABORTED:
    case EPERM:
    case ENETDOWN:
    case EPROTO:
    case ENOPROTOOPT:
    case EHOSTDOWN:
    case ENONET:
    case EHOSTUNREACH:
    case EOPNOTSUPP:
    case ENETUNREACH:
      return true;
    default:
      return false;
  }
}

// This reflects'
    replace "$1/pair.cc" '  // Register with device so we'"'"'re called when peer connects
  changeState(LISTENING);' '  if (meetsAtOnce()) {
    // connect() registers it, when the address of the peer is known. A
    // connection that is there before would make the loop spin until then.
    setSocketBlocking(fd_, false);
    takesPeerOnly_ = true;
    return;
  }

  // Register with device so we'"'"'re called when peer connects
  changeState(LISTENING);'
    replace "$1/pair.cc" '  if (!is_client_) {
    waitUntilConnected(lock, true);' '  if (!is_client_) {
    if (takesPeerOnly_) {
      changeState(LISTENING);
      device_->registerDescriptor(fd_, EPOLLIN, this);
    }
    waitUntilConnected(lock, true);'
    replace "$1/pair.cc" '  // First destroy listening socket.
  device_->unregisterDescriptor(fd_, this);
  ::close(fd_);' '  // First destroy listening socket.
  if (!takesPeerOnly_) {
    device_->unregisterDescriptor(fd_, this);
  }
  ::close(fd_);'
    replace "$1/pair.cc" '  // Connect to peer
  rv = ::connect(' '  if (takesPeerOnly_) {
    // Of the address that the peer knows, any port.
    struct sockaddr_storage own = selfAddr;
    if (own.ss_family == AF_INET) {
      ((struct sockaddr_in*)&own)->sin_port = 0;
    } else {
      ((struct sockaddr_in6*)&own)->sin6_port = 0;
    }
    rv = bind(fd_, (const struct sockaddr*)&own, addrlen);
    if (rv == -1) {
      ::close(fd_);
      fd_ = FD_INVALID;
      signalAndThrowException(GLOO_ERROR_MSG("bind: ", strerror(errno)));
    }
  }

  // Connect to peer
  rv = ::connect('
    replace "$1/pair.cc" '  rv = accept(fd_, (struct sockaddr*)&addr, &addrlen);
' '  rv = accept(fd_, (struct sockaddr*)&addr, &addrlen);
  if (takesPeerOnly_) {
    if (rv == -1 && isOfTheConnection(errno)) {
      return;
    }
    if (rv != -1 && !areOfOneMachine(addr, peer_.getSockaddr())) {
      ::close(rv);
      return;
    }
  }
'
    replace "$1/pair.cc" '        // it takes care of cleaning up the socket itself.
        // There is no additional cleanup needed here.
' '        // it takes care of cleaning up the socket itself. With
        // takesPeerOnly_ it persists up to Pair::connect.
        if (fd_ != FD_INVALID) {
          ::close(fd_);
          fd_ = FD_INVALID;
        }
'
}

is_whole() {   # the wheel: Horovod builds "successfully" without its library too
    "$python" -c 'import sys, zipfile
names = zipfile.ZipFile(sys.argv[1]).namelist()
sys.exit(not any(name.startswith("horovod/torch/mpi_lib_v2.") for name in names))' "$1"
}

build_horovod() {   # the folder that keeps the wheel
    local work cmake wheel operations=
    work=$(mktemp -d "$1/.build.XXXXXX")
    printf 'horovod==%s --hash=sha256:%s\n' "$horovod" "$horovod_sha256" >"$work/wanted.txt"
    pip download --no-deps --no-build-isolation --no-binary horovod --dest "$work" --requirement "$work/wanted.txt"
    tar -xzf "$work/horovod-$horovod.tar.gz" -C "$work"
    mend_sources "$work/horovod-$horovod"
    cmake=$(cmake_for_horovod)
    [[ $gpu == nccl ]] && operations=NCCL
    say "building Horovod $horovod for torch $torch_version ($gpu); about 4 minutes on 2 cores"
    MAKEFLAGS=${MAKEFLAGS:--j$(nproc)} HOROVOD_CMAKE=$cmake HOROVOD_GPU_OPERATIONS=$operations \
        HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1 HOROVOD_CPU_OPERATIONS=GLOO \
        HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 \
        pip wheel --use-pep517 --no-deps --no-build-isolation --no-cache-dir \
        --wheel-dir "$work/out" "$work/horovod-$horovod"
    for wheel in "$work"/out/horovod-"$horovod"-*.whl; do
        is_whole "$wheel" || die "Horovod was built without its library for torch. The log: $log"
        mv "$wheel" "$1/"
    done
    # Nothing else uses it, and an image has no build tool. An environment that got a kept wheel has none either.
    if [[ $cmake == "$venv/bin/cmake" ]]; then pip uninstall --yes cmake; fi
    rm -rf "$work"
}

kept=$cache/torch-$torch_version-$(platform)-$gpu-$recipe
wheel() { compgen -G "$kept/horovod-$horovod-*.whl"; }

mkdir -p "$kept"
exec 9>"$kept/lock"
take_lock 9
if ! wheel >/dev/null; then
    rm -rf "$kept"/.build.*            # of a build that was killed
    check_build_tools
    stop_if_missing
    build_horovod "$kept"
fi
# Always anew: a Horovod built for another torch bears the same version.
pip install --force-reinstall --no-deps "$(wheel)"
exec 9>&-

# ---- 5. the rest ----

say "installing the project and what it needs"
plan --no-build-isolation --editable "${root}[$extras]"
install_listed plan "$venv/plan.json"
pip install --no-deps --no-build-isolation --editable "$root"
rm -rf "$root/elastic_trainer.egg-info"    # left by the build; with it our metadata would be found twice
# import horovod.torch alone only prints that there is no library.
"$python" -c 'from horovod.torch.mpi_ops import gloo_built; assert gloo_built()' >>"$log" 2>&1 ||
    { tail -n 25 "$log" >&2; die "the kept Horovod cannot be loaded. Delete $kept and run this again."; }
pip check
rm -f "$venv"/{plan.json,wanted.txt}

printf '%s\n%s\n' "$(fingerprint)" "$spec" >"$venv/.installed-$extras"
say "done: $venv"
