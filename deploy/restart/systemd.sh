#!/bin/sh
# Restart command of `paceline adapt watch` for vLLM servers that are systemd units of this machine, one for each port:
#
#     paceline adapt watch --engine vllm --restart deploy/restart/systemd.sh \
#         --server http://127.0.0.1:8000 --server http://127.0.0.1:8001 ...
#
# The unit vllm@.service reads the file that is written here:
#
#     EnvironmentFile=/etc/vllm/%i.env
#     ExecStart=/srv/vllm/bin/vllm serve Qwen/Qwen3-8B --port %i --speculative-config ${PACELINE_SPECULATIVE_CONFIG}
set -eu
port=${PACELINE_SERVER##*:}
file=${VLLM_ENVIRONMENT:-/etc/vllm}/$port.env
printf "PACELINE_SPECULATIVE_CONFIG='%s'\n" "$PACELINE_SPECULATIVE_CONFIG" > "$file.new"
mv "$file.new" "$file"
systemctl restart "vllm@$port"
