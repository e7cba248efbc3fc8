#!/bin/sh
# Restart command of `paceline adapt watch` for vLLM or SGLang on Kubernetes, one Deployment and Service for each replica:
#
#     paceline adapt watch --engine vllm --restart deploy/restart/kubectl.sh --state /data/adapt \
#         --server http://vllm-0:8000 --server http://vllm-1:8000 ...
#
# The host's name, up to the first dot, is the Deployment's. It starts its engine with the drafter /data/serving/NAME, a
# link that is set here. /data is the volume of the drafters, in the daemon and in the engines; --state lies on it.
# vLLM's production stack: one entry of modelSpec for each replica; its Deployments are called
# RELEASE-NAME-deployment-vllm: set DEPLOYMENT to RELEASE-%s-deployment-vllm.
set -eu
host=${PACELINE_SERVER#*://}
name=${host%%[.:/]*}
case $name in
    localhost | "["*) name= ;;
    *[!0-9]*) ;;
    *) name= ;;
esac
if [ -z "$name" ]; then
    echo "$PACELINE_SERVER names no Deployment: give --server http://DEPLOYMENT:PORT, also for a forwarded port" >&2
    exit 2
fi
# shellcheck disable=SC2059
deployment=deployment/$(printf "${DEPLOYMENT:-%s}" "$name")
links=${DRAFTER_LINKS:-/data/serving}
mkdir -p "$links"
ln -sfn "$PACELINE_DRAFTER" "$links/$name.new"
mv -T "$links/$name.new" "$links/$name"
kubectl rollout restart "$deployment"
kubectl rollout status "$deployment" --timeout "${ROLLOUT_TIMEOUT:-9m}"
