#!/bin/sh
# Training command of `paceline adapt watch` on Kubernetes: a Job of one pod with several GPUs, which is deleted when it has ended.
#
#     IMAGE=registry.example.com/paceline:latest CLAIM=paceline GPUS=8 \
#         paceline adapt watch --state /data/adapt --train-units 8 --train-command deploy/train/kubectl.sh ...
#
# The claim holds --state and the incumbent, and the target unless that is a hub id. It is mounted in the pod at the first folder
# of --state (here /data), as for the daemon. The image needs paceline with the extra train: --build-arg EXTRAS=train of
# deploy/Dockerfile. The last line of a failed Job is the last line of stderr, which is the reason in the daemon's log.
set -eu
for value in "$PACELINE_WINDOW" "$PACELINE_OUT" "$PACELINE_INCUMBENT" "$PACELINE_MODEL" "$PACELINE_GENERAL"; do
    case $value in
        *[\"\\]*)
            echo "$value has a quote or a backslash: rename it" >&2
            exit 2
            ;;
    esac
done
answers=
IFS=:
for folder in "$PACELINE_WINDOW" $PACELINE_GENERAL; do
    answers="$answers
            - --answers
            - \"$folder\""
done
unset IFS
vocabulary=
if [ -n "${PACELINE_DRAFT_VOCAB:-}" ]; then
    vocabulary="
            - --draft-vocab
            - \"$PACELINE_DRAFT_VOCAB\""
fi
job=paceline-train-$(printf %s "$PACELINE_OUT" | sha256sum | cut -c 1-12)
root=${PACELINE_OUT#/}
# The trap runs as soon as the wait below is interrupted by the daemon's signal.
remove() { kubectl delete job "$job" --ignore-not-found "$@" > /dev/null; }
remove # of a daemon that was killed: paceline train resumes its run
trap 'remove --wait=false' EXIT
trap 'exit 143' TERM INT
kubectl create --filename - << END
apiVersion: batch/v1
kind: Job
metadata:
  name: $job
  labels: {app.kubernetes.io/name: paceline-train}
spec:
  backoffLimit: 3
  template:
    spec:
      restartPolicy: Never # its log tells why it failed
      automountServiceAccountToken: false
      containers:
        - name: train
          image: ${IMAGE:-registry.example.com/paceline:latest}
          command: [torchrun, --standalone, --nproc-per-node, "${GPUS:-8}", -m, paceline, train]
          args:
            - --target
            - "$PACELINE_MODEL"
            - --init
            - "$PACELINE_INCUMBENT"
            - --out
            - "$PACELINE_OUT"
            - --lr
            - "$PACELINE_LEARNING_RATE"
            - --max-minutes
            - "$PACELINE_MINUTES"
            - --keep
            - best$vocabulary$answers
          resources:
            limits: {nvidia.com/gpu: "${GPUS:-8}"}
          volumeMounts:
            - {name: work, mountPath: "/${root%%/*}"}
            - {name: memory, mountPath: /dev/shm}
      volumes:
        - name: work
          persistentVolumeClaim: {claimName: "${CLAIM:-paceline}"}
        - name: memory
          emptyDir: {medium: Memory, sizeLimit: 8Gi}
END
failures=0
while [ "$failures" -lt 30 ]; do
    if ended=$(kubectl get job "$job" --output 'jsonpath={.status.conditions[?(@.status=="True")].type}'); then
        failures=0
    else
        failures=$((failures + 1)) ended=
    fi
    case $ended in
        *Complete*) exit 0 ;;
        *Failed*)
            kubectl logs "job/$job" --tail 1 >&2
            exit 1
            ;;
    esac
    sleep "${POLL_S:-10}" &
    wait $!
done
echo "kubectl get job $job has failed $failures times in a row" >&2
exit 1
