# shellcheck shell=bash
# What `provide` and `engine` share.

say() { printf 'images: %s\n' "$*"; }

die() {
    printf 'images: %s\n' "$*" >&2
    exit 1
}

if ! command -v timeout >/dev/null; then # as on macOS: without the limits
    timeout() {
        while [[ $1 == -* ]]; do shift; done
        shift
        "$@"
    }
fi

tmp=$(mktemp -d "${TMPDIR:-/tmp}/images.XXXXXXXXXX")
child=

# Nothing temporary outlives us, and no command of ours does.
clean() {
    if [ -n "$child" ]; then
        kill "$child" 2>/dev/null || true
        wait "$child" 2>/dev/null || true
    fi
    rm -rf "$tmp"
}

trap clean EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM

# Runs a command for at most so many seconds. It runs in the background because bash acts on a
# signal while it waits, but not while a command is in the foreground.
limited() {
    local seconds=$1 status=0
    shift
    timeout --kill-after=10 "$seconds" "$@" &
    child=$!
    wait "$child" || status=$?
    child=
    return "$status"
}

# The same with what it prints kept back, and shown only when it fails.
quietly() {
    limited "$@" >"$tmp/output" 2>&1 || {
        tail -n 20 "$tmp/output" >&2
        return 1
    }
}

# Asks Docker for something that takes no time.
ask_docker() { timeout 30 docker "$@" 2>/dev/null; }

apt() {
    DEBIAN_FRONTEND=noninteractive quietly 900 apt-get \
        -o Acquire::http::Timeout=30 -o Acquire::https::Timeout=30 \
        -o Acquire::Retries=2 -o DPkg::Lock::Timeout=120 "$@"
}

can_apt() { [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; }

# Installs Debian packages; only where `can_apt`.
install_packages() {
    say "installing $* with apt-get"
    apt update || true # somebody else's archive may be what fails
    apt install -y --no-install-recommends "$@" || die "apt-get cannot install $*"
}
