module drayman.dev/tests/e2e/kvm

go 1.22.0
