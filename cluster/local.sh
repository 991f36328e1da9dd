#!/usr/bin/env bash
# A Ray cluster out of machines that are already there. From the repository's root, with the same checkout and .venv on each:
#   cluster/local.sh head                          on one machine; what follows is passed on to `ray start`
#   cluster/local.sh worker HEAD_ADDRESS:6379      on each other one, after copying the head's ~/.ray/auth_token to it
set -euo pipefail

usage() {
  echo "usage: $0 head [RAY START OPTIONS] | worker HEAD_ADDRESS:6379 [RAY START OPTIONS]" >&2
  exit 2
}

export PATH="$PWD/.venv/bin:$PATH"
export RAY_AUTH_MODE=token

case "${1:-}" in
  head)
    ray get-auth-token --generate > /dev/null    # kept in ~/.ray/auth_token, readable by its owner only
    shift
    export RAY_prestart_worker_first_driver=0    # one worker for each CPU, which Tune's trials could not use
    exec ray start --head --dashboard-host=127.0.0.1 --disable-usage-stats "$@"
    ;;
  worker)
    [ $# -ge 2 ] || usage
    address=$2
    shift 2
    exec ray start --address="$address" --disable-usage-stats "$@"
    ;;
  *)
    usage
    ;;
esac
