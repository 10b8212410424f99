// Command node is a Kubernetes node whose containers are plain processes of this machine.
package main

import (
	"fmt"
	"os"

	"k8s.io/component-base/cli"

	"twinpool.dev/localcluster/node/internal/nodecmd"
)

func main() {
	command, err := nodecmd.New()
	if err != nil {
		fmt.Fprintln(os.Stderr, "node:", err)
		os.Exit(1)
	}
	os.Exit(cli.Run(command))
}
