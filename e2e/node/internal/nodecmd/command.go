// Package nodecmd is the command line of a node.
package nodecmd

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	taintutils "k8s.io/kubernetes/pkg/util/taints"

	"twinpool.dev/localcluster/node/internal/criproc"
	"twinpool.dev/localcluster/node/internal/kubenode"
)

// inNamespace is set in the environment of the second start, the one inside the node's own namespaces.
const inNamespace = "NODE_IN_NAMESPACE"

type settings struct {
	name, stateDir, kubeconfig, clientCA, images, init string
	address                                            net.IP
	port                                               int32
	podCIDR                                            string
	labels, capacity                                   map[string]string
	taints                                             []string
	leaseDuration                                      int32
	maxRestartPeriod, syncFrequency                    time.Duration
}

// New returns the command. The words of self follow the executable on the command line that starts it.
func New(self ...string) (*cobra.Command, error) {
	executable, err := os.Executable()
	if err != nil {
		return nil, err
	}
	self = append([]string{executable}, self...)
	var s settings
	cmd := &cobra.Command{
		Use:          "node",
		Short:        "A Kubernetes node whose containers are plain processes of this machine",
		Args:         cobra.NoArgs,
		SilenceUsage: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if os.Getenv(inNamespace) == "" {
				return enterNamespace(s.init, self)
			}
			return s.run(cmd.Context())
		},
	}
	f := cmd.Flags()
	f.StringVar(&s.name, "name", "", "name of the node")
	f.IPVar(&s.address, "address", net.IPv4(127, 0, 0, 1), "address of the node, where the kubelet serves")
	f.Int32Var(&s.port, "port", 10250, "port of the kubelet")
	f.StringVar(&s.podCIDR, "pod-cidr", "127.1.0.0/24", "addresses of the pods, local to this machine and to no other node")
	f.StringVar(&s.stateDir, "state-dir", "", "directory for everything that the node writes")
	f.StringVar(&s.kubeconfig, "kubeconfig", "", "file that says how to reach the API server")
	f.StringVar(&s.clientCA, "client-ca-file", "", "authority of the client certificates that the kubelet trusts")
	f.StringToStringVar(&s.labels, "labels", nil, "labels of the node")
	f.StringSliceVar(&s.taints, "taints", nil, "taints of the node, KEY=VALUE:EFFECT")
	f.StringToStringVar(&s.capacity, "capacity", nil, "resources of the node, added to cpu=8,memory=32Gi,pods=110,ephemeral-storage=100Gi")
	f.StringVar(&s.images, "images", "", "JSON file that says how images start; it is read anew for every container")
	f.StringVar(&s.init, "init", filepath.Join(filepath.Dir(executable), "podinit"), "path of podinit")
	f.Int32Var(&s.leaseDuration, "lease-duration", 40, "seconds that the node's lease is good for")
	f.DurationVar(&s.maxRestartPeriod, "max-restart-period", 5*time.Minute, "longest back-off between restarts of a container")
	f.DurationVar(&s.syncFrequency, "sync-frequency", time.Minute, "time between looks at a pod that nothing happens to; volumes follow their sources then")
	for _, name := range []string{"name", "state-dir", "kubeconfig", "client-ca-file"} {
		if err := cmd.MarkFlagRequired(name); err != nil {
			return nil, err
		}
	}
	return cmd, nil
}

// enterNamespace starts this command once more, inside namespaces of its own.
func enterNamespace(init string, self []string) error {
	argv := append(append([]string{init, "node"}, self...), os.Args[1:]...)
	return fmt.Errorf("%s: %w", init, syscall.Exec(init, argv, append(os.Environ(), inNamespace+"=1")))
}

func (s settings) run(ctx context.Context) error {
	// Mounts of the node must not be seen outside; those of containers start from the node's.
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("private mounts: %w", err)
	}
	var err error
	if s.stateDir, err = filepath.Abs(s.stateDir); err != nil {
		return err
	}
	capacity, err := s.resources()
	if err != nil {
		return err
	}
	taints, _, err := taintutils.ParseTaints(s.taints)
	if err != nil {
		return err
	}
	client, err := clientcmd.BuildConfigFromFlags("", s.kubeconfig)
	if err != nil {
		return err
	}
	if err := kubenode.MakeDirs(s.stateDir); err != nil {
		return err
	}
	images := criproc.Images(s.images)
	runtime, err := s.runtime(images, client)
	if err != nil {
		return err
	}
	err = kubenode.Start(ctx, kubenode.Options{
		Name:             s.name,
		Address:          s.address,
		Port:             s.port,
		StateDir:         s.stateDir,
		Client:           client,
		ClientCAFile:     s.clientCA,
		Labels:           s.labels,
		Taints:           taints,
		Capacity:         capacity,
		LeaseDuration:    s.leaseDuration,
		MaxRestartPeriod: s.maxRestartPeriod,
		SyncFrequency:    s.syncFrequency,
		Runtime:          runtime,
		Images:           &criproc.ImageService{Images: images, Dir: s.stateDir},
	})
	if err != nil {
		return err
	}
	<-ctx.Done() // the containers die with this process
	return nil
}

func (s settings) runtime(images criproc.Images, client *rest.Config) (*criproc.Runtime, error) {
	podCIDR, err := netip.ParsePrefix(s.podCIDR)
	if err != nil {
		return nil, err
	}
	// The address of the Service "kubernetes", which the kubelet puts into every container, leads nowhere without
	// kube-proxy: containers get the real one.
	server, err := url.Parse(client.Host)
	if err != nil {
		return nil, err
	}
	if server.Port() == "" {
		return nil, errors.New("kubeconfig: the API server has no port")
	}
	return criproc.New(criproc.Config{
		StateDir: filepath.Join(s.stateDir, "containers"),
		PodCIDR:  podCIDR,
		Init:     s.init,
		Images:   images,
		Env: map[string]string{
			"KUBERNETES_SERVICE_HOST":       server.Hostname(),
			"KUBERNETES_SERVICE_PORT":       server.Port(),
			"KUBERNETES_SERVICE_PORT_HTTPS": server.Port(),
		},
	})
}

func (s settings) resources() (v1.ResourceList, error) {
	list := v1.ResourceList{
		v1.ResourceCPU:              resource.MustParse("8"),
		v1.ResourceMemory:           resource.MustParse("32Gi"),
		v1.ResourcePods:             resource.MustParse("110"),
		v1.ResourceEphemeralStorage: resource.MustParse("100Gi"),
	}
	for name, value := range s.capacity {
		quantity, err := resource.ParseQuantity(value)
		if err != nil {
			return nil, fmt.Errorf("capacity %s: %w", name, err)
		}
		list[v1.ResourceName(name)] = quantity
	}
	return list, nil
}
