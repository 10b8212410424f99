// Command controlplane is one binary with three Kubernetes components, kubectl and the node; the first argument (or argv[0])
// selects one. It links the shared 90 % of the code once instead of five times.
package main

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"

	kubectl "k8s.io/kubectl/pkg/cmd"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	manager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"

	"twinpool.dev/localcluster/node/internal/nodecmd"
)

var components = map[string]func() (*cobra.Command, error){
	"kube-apiserver":          func() (*cobra.Command, error) { return apiserver.NewAPIServerCommand(), nil },
	"kube-controller-manager": func() (*cobra.Command, error) { return manager.NewControllerManagerCommand(), nil },
	"kube-scheduler":          func() (*cobra.Command, error) { return scheduler.NewSchedulerCommand(), nil },
	"kubectl":                 func() (*cobra.Command, error) { return kubectl.NewDefaultKubectlCommand(), nil },
	"node":                    func() (*cobra.Command, error) { return nodecmd.New("node") },
}

func main() {
	name := filepath.Base(os.Args[0])
	if _, ok := components[name]; !ok && len(os.Args) > 1 {
		name, os.Args = os.Args[1], os.Args[1:]
	}
	newCommand, ok := components[name]
	if !ok {
		fmt.Fprintf(os.Stderr, "usage: controlplane kube-apiserver|kube-controller-manager|kube-scheduler|kubectl|node [flags]\n")
		os.Exit(2)
	}
	command, err := newCommand()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(cli.Run(command))
}
