# Sourced by the scripts for `cluster up --hook`: starts drayman in the test cluster as an installation would, with users that have exactly
# the rights of hack/rbac.yaml. The hook sets KUBECONFIG (an administrator's) and CLUSTER.
# shellcheck shell=bash

: "${KUBECONFIG:?is set by cluster up --hook}" "${CLUSTER:?is set by cluster up --hook}"

DIRECTORY=$(grep -oE '"directory":"[^"]*"' <<<"$CLUSTER" | cut -d '"' -f 4)
LOG=$DIRECTORY/log
NODE_INIT=$(grep -oE '"init":[0-9]+' <<<"$CLUSTER" | head -n 1 | cut -d : -f 2)
NODE_NAME=$(kubectl get nodes --output 'jsonpath={.items[0].metadata.name}')
# The node's files, including /dev, are in its own mount namespace.
IN_NODE=(nsenter "--mount=/proc/$NODE_INIT/ns/mnt" --)

# Writes a kubeconfig that impersonates a user, and prints its path.
kubeconfig_of() {
    local file=$DIRECTORY/kubeconfig/$1-hook.yaml user
    kubectl config view --raw --flatten --minify >"$file"
    user=$(kubectl config view --minify --output 'jsonpath={.users[0].name}')
    kubectl --kubeconfig "$file" config set "users.$user.act-as" "$1" >/dev/null
    echo "$file"
}

# The devices of examples/node.yaml.
make_devices() {
    "${IN_NODE[@]}" "$PWD/hack/pretend-devices"
}

# Starts the companion and, if the cluster has classic DRA, the controller. Sets CONTROLLER and COMPANION to their process ids. Their logs
# are beside the logs of the cluster.
start_drayman() {
    local program=$1 config=$2 as_controller as_node
    "$program" crds | kubectl apply --server-side --filename - >/dev/null
    kubectl apply --filename hack/rbac.yaml >/dev/null
    "$program" crds | kubectl wait --for condition=Established --timeout 30s --filename - >/dev/null
    as_controller=$(kubeconfig_of drayman-controller)
    as_node=$(kubeconfig_of drayman-node)
    CONTROLLER=
    if serves v1alpha2; then
        # In its own session, like the companion, so that Ctrl-C reaches only the hook, which then stops both once.
        setsid "$program" controller --kubeconfig "$as_controller" 2>"$LOG/drayman-controller.log" &
        CONTROLLER=$!
    fi
    start_companion "$program" "$config" "$as_node"
}

# Starts the companion in structured mode, which has no controller: CONTROLLER is empty.
start_structured_drayman() {
    local program=$1 config=$2 as_node
    kubectl apply --filename hack/rbac.yaml >/dev/null
    kubectl create clusterrolebinding drayman-node-structured --clusterrole drayman-node-structured --user drayman-node >/dev/null
    as_node=$(kubeconfig_of drayman-node)
    CONTROLLER=
    start_companion "$program" "$config" "$as_node"
}

# Whether the cluster serves this version of resource.k8s.io.
serves() {
    kubectl get --raw /apis/resource.k8s.io 2>/dev/null | grep --quiet "\"resource.k8s.io/$1\""
}

start_companion() {
    local program=$1 config=$2 as_node=$3
    # setsid and nsenter exec the program, so this is the program's own process id.
    setsid "${IN_NODE[@]}" "$program" node --kubeconfig "$as_node" --node-name "$NODE_NAME" --config "$config" \
        2>"$LOG/drayman-node.log" &
    COMPANION=$!
    trap stop_drayman EXIT
    trap 'exit 0' INT TERM
}

# Stops the programs as kubelet would.
stop_drayman() {
    # shellcheck disable=SC2086 # an empty one is no argument
    kill $CONTROLLER $COMPANION 2>/dev/null || true
    # shellcheck disable=SC2086
    wait $CONTROLLER $COMPANION 2>/dev/null || true
}

# Fails, and prints the ends of the logs, unless the programs are running.
assert_running() {
    local name pid
    for name in controller node; do
        pid=$CONTROLLER
        [[ $name == controller ]] || pid=$COMPANION
        [[ -n $pid ]] || continue
        if ! kill -0 "$pid" 2>/dev/null; then
            echo "drayman $name has ended:" >&2
            tail -n 20 "$LOG/drayman-$name.log" >&2
            return 1
        fi
    done
}
