// Command podinit is the first process of every container, and the launcher of a node.
//
//	podinit node COMMAND...   run COMMAND in a mount namespace of its own (and a user namespace, unless root)
//	podinit container         start the container described on descriptor 3 and wait for it
//	podinit exec              run the process described on descriptor 3 inside a running container
//
// It is separate from the node because one stays around per container: it must be small.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"twinpool.dev/localcluster/node/internal/initspec"
)

func init() {
	// Parent-death signals and setns belong to a thread: keep main on the first one.
	runtime.LockOSThread()
}

func main() {
	if len(os.Args) < 2 {
		fail(errors.New("usage: podinit node COMMAND... | container | exec"))
	}
	var process *os.Process
	var err error
	if os.Args[1] != "node" {
		unix.CloseOnExec(initspec.ReportFD)
	}
	switch mode := os.Args[1]; mode {
	case "node":
		process, err = startNode(os.Args[2:])
	case "container":
		process, err = startContainer()
	case "exec":
		process, err = startExec()
	default:
		err = fmt.Errorf("unknown mode %q", mode)
	}
	if err != nil {
		fail(err)
	}
	if os.Args[1] != "node" {
		unix.Close(initspec.ReportFD) // end of file without a message: started
	}
	os.Exit(waitFor(process))
}

// fail tells the reason to the runtime, or to the terminal when started by hand.
func fail(err error) {
	if _, werr := unix.Write(initspec.ReportFD, []byte(err.Error())); werr != nil {
		fmt.Fprintln(os.Stderr, "podinit:", err)
	}
	os.Exit(initspec.NotStarted)
}

// waitFor forwards signals to process and reaps every child until process ends. When podinit is the first process
// of a PID namespace the kernel then kills whatever is left in it.
func waitFor(process *os.Process) int {
	signals := make(chan os.Signal, 64)
	signal.Notify(signals)
	go func() {
		for s := range signals {
			switch s {
			case unix.SIGCHLD, unix.SIGURG, unix.SIGPIPE: // ours, the Go runtime's, nobody's
			default:
				process.Signal(s)
			}
		}
	}()
	for {
		var status syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &status, 0, nil)
		switch {
		case err == syscall.EINTR:
		case err != nil:
			return initspec.NotStarted
		case pid == process.Pid && status.Signaled():
			return 128 + int(status.Signal())
		case pid == process.Pid && status.Exited():
			return status.ExitStatus()
		}
	}
}

// startNode gives the node its own mount namespace: its volumes vanish with it, however it ends. Without root a user
// namespace comes first, in which the user is root.
func startNode(command []string) (*os.Process, error) {
	if len(command) == 0 {
		return nil, errors.New("node: no command")
	}
	attr := &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNS, Pdeathsig: unix.SIGKILL}
	if uid, gid := os.Geteuid(), os.Getegid(); uid != 0 {
		attr.Cloneflags |= unix.CLONE_NEWUSER
		attr.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: uid, Size: 1}}
		attr.GidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: gid, Size: 1}}
	}
	return start(initspec.Process{Command: command, Env: os.Environ()}, attr)
}

func startContainer() (*os.Process, error) {
	var spec initspec.Container
	if err := readSpec(&spec); err != nil {
		return nil, err
	}
	if err := buildTree(spec); err != nil {
		return nil, err
	}
	if err := unix.Sethostname([]byte(spec.Hostname)); err != nil {
		return nil, fmt.Errorf("set hostname: %w", err)
	}
	return start(spec.Process, &syscall.SysProcAttr{})
}

func startExec() (*os.Process, error) {
	var spec initspec.Exec
	if err := readSpec(&spec); err != nil {
		return nil, err
	}
	// A thread that shares its working directory with others must not change its mount namespace.
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return nil, fmt.Errorf("unshare: %w", err)
	}
	kinds := []string{"pid", "uts", "mnt"} // mnt last: /proc is another one afterwards
	files := make([]*os.File, len(kinds))
	for i, kind := range kinds {
		var err error
		if files[i], err = os.Open(fmt.Sprintf("/proc/%d/ns/%s", spec.Init, kind)); err != nil {
			return nil, err
		}
		defer files[i].Close()
	}
	for i, kind := range kinds {
		if err := unix.Setns(int(files[i].Fd()), 0); err != nil {
			return nil, fmt.Errorf("enter %s namespace: %w", kind, err)
		}
	}
	// No parent-death signal: a child in another PID namespace cannot see its parent, takes it for dead, and kills
	// itself. It ends with the process group of podinit, or with the container.
	return start(spec.Process, &syscall.SysProcAttr{})
}

func readSpec(spec any) error {
	file := os.NewFile(initspec.SpecFD, "spec")
	defer file.Close()
	return json.NewDecoder(file).Decode(spec)
}

func start(p initspec.Process, attr *syscall.SysProcAttr) (*os.Process, error) {
	os.Clearenv()
	for _, entry := range p.Env { // for LookPath
		if key, value, ok := strings.Cut(entry, "="); ok {
			os.Setenv(key, value)
		}
	}
	dir := p.Dir
	if dir == "" {
		dir = "/"
		if attr.Cloneflags != 0 {
			dir = "." // the node stays where it was started
		}
	}
	if err := os.Chdir(dir); err != nil {
		return nil, fmt.Errorf("working directory: %w", err)
	}
	path, err := exec.LookPath(p.Command[0])
	if err != nil && !errors.Is(err, exec.ErrDot) {
		return nil, err
	}
	return os.StartProcess(path, p.Command, &os.ProcAttr{
		Env:   p.Env,
		Files: []*os.File{os.Stdin, os.Stdout, os.Stderr},
		Sys:   attr,
	})
}
