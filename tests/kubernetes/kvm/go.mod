module drayman.dev/tests/kubernetes/kvm

go 1.22.0
