module drayman.dev/tests/cluster

go 1.22
