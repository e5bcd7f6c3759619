#!/usr/bin/env bash
# A kind cluster whose one node has this machine's NVIDIA GPUs, for who has Docker. docs/gpu-cluster.md says what Docker needs.
# usage: scripts/kind_gpu.sh up DIR [--gpus real]   makes the cluster; its kubeconfigs are DIR/kubeconfig.host and DIR/kubeconfig
#        scripts/kind_gpu.sh load DIR IMAGE.tar     gives the node an image
#        scripts/kind_gpu.sh exec DIR COMMAND...    runs a command of this machine in the node's network (root, or sudo)
#        scripts/kind_gpu.sh down DIR               removes the cluster
#        scripts/kind_gpu.sh address                prints the node's address
#        scripts/kind_gpu.sh config DIR             prints kind's configuration, and makes nothing
# As E2E_NODE it gives `make e2e-gpu` its cluster. NAME=mini-infer-gpu names it; NODE_IMAGE chooses a version of Kubernetes.
set -euo pipefail
name=${NAME:-mini-infer-gpu} node=${NAME:-mini-infer-gpu}-control-plane
plugin=$(cd "$(dirname "$0")" && pwd)/kind_gpu_device_plugin.yaml
toolkit=https://nvidia.github.io/libnvidia-container
fail() {
  echo "kind_gpu.sh: $*" >&2
  exit 1
}
need() {
  command -v "$1" >/dev/null || fail "$1 is not installed: $2"
}
config() { # DIR: engines mount folders beside DIR by their paths on this machine
  cat <<EOF
kind: Cluster
apiVersion: kind.x-k8s.io/v1alpha4
name: $name
nodes:
  - role: control-plane
    extraMounts:
      - hostPath: /dev/null # the NVIDIA runtime takes it for: all GPUs
        containerPath: /var/run/nvidia-container-devices/all
      - hostPath: $1
        containerPath: $1
EOF
}
check() {
  need docker "https://docs.docker.com/engine/install/"
  need kind "https://kind.sigs.k8s.io/docs/user/quick-start/"
  need kubectl "https://kubernetes.io/docs/tasks/tools/"
  docker info --format '{{.DefaultRuntime}}' | grep -qx nvidia ||
    fail "Docker's default runtime is not nvidia: sudo nvidia-ctk runtime configure --runtime=docker --set-as-default &&" \
      "sudo nvidia-ctk config --set accept-nvidia-visible-devices-as-volume-mounts=true --in-place && sudo systemctl restart docker"
  docker run --rm --volume /dev/null:/var/run/nvidia-container-devices/all "${CHECK_IMAGE:-ubuntu:24.04}" nvidia-smi -L >/dev/null ||
    fail "a container has no GPU: sudo nvidia-ctk config --set accept-nvidia-visible-devices-as-volume-mounts=true --in-place"
}
in_node() {
  docker exec "$node" bash -euo pipefail -c "$1"
}
up() { # DIR [--gpus real]
  local dir=$1 parent
  [ "${2:-}" != --gpus ] || [ "${3:-}" = real ] || fail "--gpus ${3:-}: this node has the machine's own GPUs, write --gpus real"
  check
  mkdir -p "$dir"
  parent=$(cd "$dir/.." && pwd)
  config "$parent" | kind create cluster --config - --kubeconfig "$dir/kubeconfig.host" --wait 120s ${NODE_IMAGE:+--image "$NODE_IMAGE"}
  kind get kubeconfig --name "$name" --internal | sed "s#https://$node:6443#https://127.0.0.1:6443#" >"$dir/kubeconfig"
  in_node "apt-get update -qq && apt-get install -y -qq curl gpg
    curl -fsSL $toolkit/gpgkey | gpg --dearmor --yes -o /usr/share/keyrings/nvidia.gpg
    curl -fsSL $toolkit/stable/deb/nvidia-container-toolkit.list | sed 's#deb https://#deb [signed-by=/usr/share/keyrings/nvidia.gpg] https://#' >/etc/apt/sources.list.d/nvidia.list
    apt-get update -qq && apt-get install -y -qq nvidia-container-toolkit
    nvidia-ctk runtime configure --runtime=containerd --set-as-default
    umount -R /proc/driver/nvidia 2>/dev/null || true
    systemctl restart containerd"
  kubectl --kubeconfig "$dir/kubeconfig.host" apply --server-side -f "$plugin"
  kubectl --kubeconfig "$dir/kubeconfig.host" -n kube-system rollout status daemonset/nvidia-device-plugin --timeout 300s
  kubectl --kubeconfig "$dir/kubeconfig.host" wait node/"$node" --for 'jsonpath={.status.allocatable.nvidia\.com/gpu}' --timeout 120s
}
address() {
  docker inspect --format '{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}' "$node"
}
command=${1:-} dir=${2:-}
[ "$command" = address ] || [ -n "$dir" ] || fail "usage: $0 up|load|exec|down|config DIR ... (the head of this file explains them)"
case $command in
  up) shift && up "$@" ;;
  load) kind load image-archive "$3" --name "$name" ;;
  exec)
    shift 2
    as_root=()
    [ "$(id -u)" = 0 ] || as_root=(sudo --preserve-env)
    exec "${as_root[@]}" nsenter --target "$(docker inspect --format '{{.State.Pid}}' "$node")" --net "$@"
    ;;
  down) kind delete cluster --name "$name" ;;
  address) address ;;
  config) config "$dir" ;;
  *) fail "there is no command $command: up, load, exec, down, address or config" ;;
esac
