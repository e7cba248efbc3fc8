#!/bin/sh
# This checkout beside an older commit of it, a prompt of each in turns: is one stream slower than it was?
#
#   experiments/beside_commit.sh 7267d96 --prompts gsm8k_test.jsonl experiments/prompts_edit.jsonl [more options of beside_commit.py]
#
# Checks the commit out into build/beside/COMMIT and compiles its native library. Run it on an idle machine. Both run on the
# packages of this checkout's .venv.
set -eu
cd "$(dirname "$0")/.."
commit=$(git rev-parse --short "$1^{commit}")
shift
folder="build/beside/$commit"
python="$PWD/.venv/bin/python"
[ -d "$folder" ] || git worktree add --detach --force "$folder" "$commit"
[ -n "$(ls "$folder"/paceline/model/native/libpaceline_native.* 2>/dev/null)" ] ||
  (cd "$folder" && PYTHONPATH="$PWD" "$python" paceline/model/native/build.py)
exec "$python" experiments/beside_commit.py --old "$folder" "$@"
