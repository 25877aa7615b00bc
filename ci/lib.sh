# shellcheck shell=bash
# What the scripts in ci/ share; sourced, never run. It goes to the root of the repository and settles where cargo
# builds, so that the scripts work from any directory.

# A relative CARGO_TARGET_DIR is meant from where the caller stands.
[[ -z ${CARGO_TARGET_DIR:-} ]] || CARGO_TARGET_DIR=$(realpath -ms -- "$CARGO_TARGET_DIR")
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." || exit 1
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$PWD/target}

# What building takes beside cargo: a token, a C compiler and linker for the bundled SQLite, the servers' client libraries.
# shellcheck disable=SC2034 # for the scripts that source this
PACKAGES=(softhsm2 gcc libc6-dev libpq-dev libmariadb-dev)
# And what the tests take: clients that are not ours, a second kind of token (NSS), a terminal to type on, servers.
# shellcheck disable=SC2034
TEST_PACKAGES=(sqlite3 libnss3 libnss3-tools bsdutils shellcheck postgresql mariadb-server galera-4 rsync)

# need_packages PKG…: installs the Debian packages that are missing; exits 2 with the line to run if it may not.
need_packages() {
    local missing=() package
    if ! command -v dpkg-query >/dev/null; then
        printf 'no Debian packages here; taking for granted: %s\n' "$*"
        return
    fi
    for package; do
        # shellcheck disable=SC2016 # dpkg-query's own variable
        [[ $(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null) == installed ]] || missing+=("$package")
    done
    ((${#missing[@]})) || return 0
    local install="apt-get install -y --no-install-recommends ${missing[*]}"
    ((EUID == 0)) || fail 2 "packages are missing; run: sudo sh -c 'apt-get update && $install'"
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq </dev/null || fail 2 'apt-get update failed'
    # shellcheck disable=SC2086 # words
    $install </dev/null || fail 2 "failed: $install"
}

# need_cargo [SUBCOMMAND…]: exits 2 and says how to get cargo, or its subcommand (fmt, clippy). Toolchains are never
# installed.
need_cargo() {
    local least found subcommand
    least=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
    local how="get it with rustup (https://rustup.rs), or from Debian's packages cargo, rustfmt and rust-clippy where they are that new"
    command -v cargo >/dev/null || fail 2 "cargo $least or newer is missing; $how"
    found=$(cargo --version | cut -d ' ' -f 2)
    printf '%s\n' "$least" "$found" | sort -CV || fail 2 "cargo is $found, want $least or newer; $how"
    for subcommand; do
        cargo "$subcommand" --version >/dev/null 2>&1 || fail 2 "cargo $subcommand is missing; $how"
    done
}

# step HEADING COMMAND…: runs one check under a heading.
step() {
    local began=$SECONDS
    step=$1
    printf '\n=== %s\n' "$step"
    "${@:2}"
    printf '=== %s: %d s\n' "$step" "$((SECONDS - began))"
    step=''
}

# In a directory of its own, which goes when the script ends: all that the checks leave in /tmp.
begin() {
    step=''
    TMPDIR=$(mktemp -d)
    # A test reads a database as nobody, who has to get there.
    chmod 711 "$TMPDIR"
    export TMPDIR
    trap finish EXIT
}

finish() {
    local code=$?
    rm -rf -- "$TMPDIR"
    if ((code)); then
        printf '\n%s: FAILED%s after %d s\n' "$(name)" "${step:+ at: $step}" "$SECONDS" >&2
    else
        printf '\n%s: all passed in %d s\n' "$(name)" "$SECONDS"
    fi
}

# run_tests [--release]: all tests. The examples first: the fault module is one, and tests of the built program load it.
run_tests() {
    cargo build --examples --locked "$@"
    cargo test --locked "$@"
}

# fail CODE TEXT
fail() {
    printf '%s: %s\n' "$(name)" "$2" >&2
    exit "$1"
}

name() { printf 'ci/%s' "$(basename -- "$0")"; }
