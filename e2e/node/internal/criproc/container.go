package criproc

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"twinpool.dev/localcluster/node/internal/initspec"
)

// container is one process, from the time it is planned until its remains are removed.
type container struct {
	id, sandboxID string
	config        *runtimeapi.ContainerConfig
	spec          initspec.Container
	dir           string
	log           *logFile
	createdAt     time.Time
	// exited is closed when the process and all that it left behind are gone.
	exited chan struct{}

	mu         sync.Mutex // guards what follows
	state      runtimeapi.ContainerState
	init       *os.Process
	startedAt  time.Time
	finishedAt time.Time
	exitCode   int
	message    string
}

func (r *Runtime) CreateContainer(_ context.Context, sandboxID string, config *runtimeapi.ContainerConfig, sandboxConfig *runtimeapi.PodSandboxConfig) (string, error) {
	image, err := r.config.Images.find(config.Image)
	if err != nil {
		return "", err
	}
	command := image.command(config.Command, config.Args)
	if len(command) == 0 {
		return "", errors.New("no command specified")
	}
	c := &container{
		id:        newID(),
		sandboxID: sandboxID,
		config:    config,
		log:       newLogFile(filepath.Join(sandboxConfig.LogDirectory, config.LogPath)),
		createdAt: time.Now(),
		exited:    make(chan struct{}),
		state:     runtimeapi.ContainerState_CONTAINER_CREATED,
	}
	c.dir = r.containerDir(c.id)
	dir := config.WorkingDir
	if dir == "" {
		dir = image.WorkingDir
	}
	c.spec = initspec.Container{
		Hostname: sandboxConfig.Hostname,
		Stage:    filepath.Join(c.dir, "stage"),
		Process:  initspec.Process{Command: command, Dir: dir},
	}
	for _, target := range slices.Sorted(maps.Keys(image.Files)) { // first: a volume of the pod covers them
		c.spec.Mounts = append(c.spec.Mounts, initspec.Mount{Source: image.Files[target], Target: target, ReadOnly: true})
	}
	for _, m := range config.Mounts {
		c.spec.Mounts = append(c.spec.Mounts, initspec.Mount{Source: m.HostPath, Target: m.ContainerPath, ReadOnly: m.Readonly})
	}
	if c.spec.Hostname == "" { // a pod in the network of its node
		c.spec.Hostname, _ = os.Hostname()
	}
	c.spec.Process.Env = r.environment(c.spec.Hostname, image, config.Envs)
	if err := os.MkdirAll(c.spec.Stage, 0o755); err != nil {
		return "", err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.sandboxes[sandboxID] == nil {
		return "", notFound("sandbox", sandboxID)
	}
	r.containers[c.id] = c
	return c.id, nil
}

// environment merges, the later the stronger: what every runtime sets, the image, the pod, what this runtime replaces.
func (r *Runtime) environment(hostname string, image Image, pod []*runtimeapi.KeyValue) []string {
	env := map[string]string{"PATH": os.Getenv("PATH"), "HOME": os.Getenv("HOME"), "HOSTNAME": hostname}
	maps.Copy(env, image.Env)
	for _, e := range pod {
		env[e.Key] = string(e.Value)
	}
	for key, value := range r.config.Env {
		if _, ok := env[key]; ok {
			env[key] = value
		}
	}
	var list []string
	for _, key := range slices.Sorted(maps.Keys(env)) {
		list = append(list, key+"="+env[key])
	}
	return list
}

func (r *Runtime) StartContainer(_ context.Context, id string) error {
	c, err := r.container(id)
	if err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.state != runtimeapi.ContainerState_CONTAINER_CREATED {
		return fmt.Errorf("container %q was started before", id)
	}
	if err := c.log.open(); err != nil {
		return err
	}
	cmd := exec.Command(r.config.Init, "container")
	cmd.Stdout, cmd.Stderr = c.log.stream("stdout"), c.log.stream("stderr")
	cmd.WaitDelay = 5 * time.Second
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWUTS,
		Setsid:     true,
		Pdeathsig:  unix.SIGKILL,
	}
	c.startedAt = time.Now()
	if err := r.launch(cmd, c.spec); err != nil {
		c.finish(initspec.NotStarted, err.Error())
		return fmt.Errorf("start %q: %w", c.spec.Process.Command[0], err)
	}
	c.init, c.state = cmd.Process, runtimeapi.ContainerState_CONTAINER_RUNNING
	go func() {
		_ = cmd.Wait() // the exit status says it all
		c.mu.Lock()
		defer c.mu.Unlock()
		c.finish(exitCode(cmd.ProcessState), "")
	}()
	return nil
}

// launch runs podinit with spec, and returns why it could not start the process, if so.
func (r *Runtime) launch(cmd *exec.Cmd, spec any) error {
	data, err := json.Marshal(spec)
	if err != nil {
		return err
	}
	specReader, specWriter, err := os.Pipe()
	if err != nil {
		return err
	}
	defer specWriter.Close()
	reportReader, reportWriter, err := os.Pipe()
	if err != nil {
		specReader.Close()
		return err
	}
	defer reportReader.Close()
	cmd.ExtraFiles = []*os.File{specReader, reportWriter} // initspec.SpecFD, initspec.ReportFD
	err = r.processes.start(cmd)
	specReader.Close()
	reportWriter.Close()
	if err != nil {
		return err
	}
	_, err = io.Copy(specWriter, bytes.NewReader(data))
	specWriter.Close()
	report, _ := io.ReadAll(reportReader)
	if len(report) > 0 {
		_ = cmd.Wait()
		return errors.New(string(report))
	}
	return err
}

func exitCode(state *os.ProcessState) int {
	if status := state.Sys().(syscall.WaitStatus); status.Signaled() {
		return 128 + int(status.Signal())
	}
	return state.ExitCode()
}

// finish notes the end of the process. The caller holds the lock.
func (c *container) finish(code int, message string) {
	c.log.close()
	c.state, c.finishedAt = runtimeapi.ContainerState_CONTAINER_EXITED, time.Now()
	c.exitCode, c.message = code, message
	close(c.exited)
}

// running returns the first process of the container, or nil.
func (c *container) running() *os.Process {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.state != runtimeapi.ContainerState_CONTAINER_RUNNING {
		return nil
	}
	return c.init
}

// stop asks the process to end, and kills it with all its children after grace.
func (c *container) stop(ctx context.Context, grace time.Duration) error {
	process := c.running()
	if process == nil {
		return nil
	}
	if grace > 0 {
		_ = process.Signal(stopSignal(c.config.StopSignal)) // fails only when it has just ended
		select {
		case <-c.exited:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(grace):
		}
	}
	_ = process.Kill()
	<-c.exited
	return nil
}

func stopSignal(s runtimeapi.Signal) syscall.Signal {
	if s != runtimeapi.Signal_RUNTIME_DEFAULT {
		if n := unix.SignalNum(s.String()); n != 0 {
			return n
		}
	}
	return unix.SIGTERM
}

func (r *Runtime) StopContainer(ctx context.Context, id string, timeout int64) error {
	c, err := r.container(id)
	if err != nil {
		return err
	}
	return c.stop(ctx, time.Duration(timeout)*time.Second)
}

func (r *Runtime) RemoveContainer(ctx context.Context, id string) error {
	c, err := r.container(id)
	if err != nil {
		return nil // removed before
	}
	if err := c.stop(ctx, 0); err != nil {
		return err
	}
	r.mu.Lock()
	delete(r.containers, id)
	r.mu.Unlock()
	return os.RemoveAll(c.dir)
}

func (r *Runtime) ReopenContainerLog(_ context.Context, id string) error {
	c, err := r.container(id)
	if err != nil {
		return err
	}
	return c.log.open()
}

func (r *Runtime) ListContainers(_ context.Context, filter *runtimeapi.ContainerFilter) ([]*runtimeapi.Container, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var list []*runtimeapi.Container
	for _, c := range r.containers {
		status := c.status()
		if id := filter.GetId(); id != "" && id != c.id {
			continue
		}
		if id := filter.GetPodSandboxId(); id != "" && id != c.sandboxID {
			continue
		}
		if filter.GetState() != nil && filter.GetState().State != status.State ||
			!selected(c.config.Labels, filter.GetLabelSelector()) {
			continue
		}
		list = append(list, &runtimeapi.Container{
			Id:           c.id,
			PodSandboxId: c.sandboxID,
			Metadata:     c.config.Metadata,
			Image:        c.config.Image,
			ImageRef:     status.ImageRef,
			ImageId:      status.ImageId,
			State:        status.State,
			CreatedAt:    status.CreatedAt,
			Labels:       c.config.Labels,
			Annotations:  c.config.Annotations,
		})
	}
	return list, nil
}

func (r *Runtime) ContainerStatus(_ context.Context, id string, _ bool) (*runtimeapi.ContainerStatusResponse, error) {
	c, err := r.container(id)
	if err != nil {
		return nil, err
	}
	return &runtimeapi.ContainerStatusResponse{Status: c.status()}, nil
}

func (c *container) status() *runtimeapi.ContainerStatus {
	c.mu.Lock()
	defer c.mu.Unlock()
	status := &runtimeapi.ContainerStatus{
		Id:          c.id,
		Metadata:    c.config.Metadata,
		State:       c.state,
		CreatedAt:   c.createdAt.UnixNano(),
		Image:       &runtimeapi.ImageSpec{Image: c.config.Image.UserSpecifiedImage},
		ImageRef:    c.config.Image.Image,
		ImageId:     c.config.Image.Image,
		Message:     c.message,
		Labels:      c.config.Labels,
		Annotations: c.config.Annotations,
		Mounts:      c.config.Mounts,
		LogPath:     c.log.path,
		StopSignal:  c.config.StopSignal,
	}
	if !c.startedAt.IsZero() {
		status.StartedAt = c.startedAt.UnixNano()
	}
	if c.state == runtimeapi.ContainerState_CONTAINER_EXITED {
		status.FinishedAt, status.ExitCode = c.finishedAt.UnixNano(), int32(c.exitCode)
		switch {
		case c.init == nil:
			status.Reason = "StartError"
		case c.exitCode == 0:
			status.Reason = "Completed"
		default:
			status.Reason = "Error"
		}
	}
	return status
}

func (r *Runtime) container(id string) (*container, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if c := r.containers[id]; c != nil {
		return c, nil
	}
	return nil, notFound("container", id)
}

func (r *Runtime) containersOf(sandboxID string) []*container {
	r.mu.Lock()
	defer r.mu.Unlock()
	var list []*container
	for _, c := range r.containers {
		if c.sandboxID == sandboxID {
			list = append(list, c)
		}
	}
	return list
}
