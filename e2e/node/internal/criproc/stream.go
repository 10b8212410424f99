package criproc

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	remote "k8s.io/cri-client/pkg"
	"k8s.io/cri-streaming/pkg/streaming"
	"k8s.io/cri-streaming/pkg/streaming/remotecommand"
	"k8s.io/klog/v2"
	utilexec "k8s.io/utils/exec"

	"twinpool.dev/localcluster/node/internal/initspec"
)

// serveStreams listens where the kubelet sends the clients of exec and port-forward to. The URLs hold a random token
// that is good for one request.
func serveStreams(r *Runtime) (streaming.Server, error) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	config := streaming.DefaultConfig
	config.BaseURL = &url.URL{Scheme: "http", Host: listener.Addr().String()}
	server, err := streaming.NewServer(config, streamer{r})
	if err != nil {
		return nil, err
	}
	go func() { klog.ErrorS(http.Serve(listener, server), "Stream server ended") }()
	return server, nil
}

func (r *Runtime) Exec(_ context.Context, request *runtimeapi.ExecRequest) (*runtimeapi.ExecResponse, error) {
	return r.streams.GetExec(request)
}

func (r *Runtime) Attach(_ context.Context, request *runtimeapi.AttachRequest) (*runtimeapi.AttachResponse, error) {
	return r.streams.GetAttach(request)
}

func (r *Runtime) PortForward(_ context.Context, request *runtimeapi.PortForwardRequest) (*runtimeapi.PortForwardResponse, error) {
	return r.streams.GetPortForward(request)
}

func (r *Runtime) ExecSync(ctx context.Context, id string, command []string, timeout time.Duration) (stdout, stderr []byte, err error) {
	if timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, timeout)
		defer cancel()
	}
	var out, errOut bytes.Buffer
	err = r.exec(ctx, id, command, nil, &out, &errOut)
	if ctx.Err() == context.DeadlineExceeded {
		err = fmt.Errorf("%w: %q timed out after %s", remote.ErrCommandTimedOut, strings.Join(command, " "), timeout)
	}
	return out.Bytes(), errOut.Bytes(), err
}

// exec runs command in a running container and waits for it. A failure of the command is a utilexec.CodeExitError.
func (r *Runtime) exec(ctx context.Context, id string, command []string, in io.Reader, out, errOut io.Writer) error {
	c, err := r.container(id)
	if err != nil {
		return err
	}
	process := c.running()
	if process == nil {
		return fmt.Errorf("container %q is not running", id)
	}
	cmd := exec.CommandContext(ctx, r.config.Init, "exec")
	cmd.Stdout, cmd.Stderr = out, errOut
	if in != nil { // not cmd.Stdin: Wait would wait for the end of it
		stdin, err := cmd.StdinPipe()
		if err != nil {
			return err
		}
		go func() {
			_, _ = io.Copy(stdin, in)
			_ = stdin.Close()
		}()
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Pdeathsig: unix.SIGKILL}
	cmd.Cancel = func() error { return unix.Kill(-cmd.Process.Pid, unix.SIGKILL) }
	cmd.WaitDelay = time.Second
	spec := initspec.Exec{Init: process.Pid, Process: c.spec.Process}
	spec.Process.Command = command
	if err := r.launch(cmd, spec); err != nil {
		return fmt.Errorf("exec %q: %w", command, err)
	}
	_ = cmd.Wait()
	if code := exitCode(cmd.ProcessState); code != 0 {
		return utilexec.CodeExitError{Err: fmt.Errorf("command %q exited with %d", command, code), Code: code}
	}
	return nil
}

// streamer connects the streams of a client.
type streamer struct{ runtime *Runtime }

func (s streamer) Exec(ctx context.Context, id string, command []string, in io.Reader, out, errOut io.WriteCloser, tty bool, _ <-chan remotecommand.TerminalSize) error {
	if tty { // there is no terminal: a plain pipe for both outputs
		errOut = out
	}
	return s.runtime.exec(ctx, id, command, in, writer(out), writer(errOut))
}

func (s streamer) Attach(context.Context, string, io.Reader, io.WriteCloser, io.WriteCloser, bool, <-chan remotecommand.TerminalSize) error {
	return unimplemented("attach")
}

func (s streamer) PortForward(ctx context.Context, id string, port int32, stream io.ReadWriteCloser) error {
	address, err := s.runtime.podAddress(id)
	if err != nil {
		return err
	}
	var dialer net.Dialer
	conn, err := dialer.DialContext(ctx, "tcp", net.JoinHostPort(address, strconv.Itoa(int(port))))
	if err != nil {
		return err
	}
	defer conn.Close()
	go func() {
		_, _ = io.Copy(conn, stream)
		_ = conn.(*net.TCPConn).CloseWrite()
	}()
	_, err = io.Copy(stream, conn)
	return err
}

// writer avoids an interface that is not nil but holds nil.
func writer(w io.WriteCloser) io.Writer {
	if w == nil {
		return nil
	}
	return w
}
