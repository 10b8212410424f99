"""A real Kubernetes cluster on one machine, without containers.

etcd, kube-apiserver, kube-controller-manager and kube-scheduler run as plain processes on an own loopback address;
every node is the kubelet with a small runtime (``e2e/node``) whose containers are local processes. It always holds that
all processes hang in one tree under one supervisor: however that one ends, nothing is left behind.
"""
