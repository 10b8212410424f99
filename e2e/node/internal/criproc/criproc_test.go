package criproc

import (
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func TestAddressesAreNotReusedAtOnce(t *testing.T) {
	pool := newAddressPool(netip.MustParsePrefix("127.1.1.0/29")) // .1 to .6
	var got []string
	for range 3 {
		addr, err := pool.take()
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, addr.String())
		pool.release(addr)
	}
	if want := []string{"127.1.1.1", "127.1.1.2", "127.1.1.3"}; !reflect.DeepEqual(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

func TestAddressesRunOut(t *testing.T) {
	pool := newAddressPool(netip.MustParsePrefix("127.1.1.0/30"))
	first, _ := pool.take()
	if _, err := pool.take(); err != nil {
		t.Fatal(err)
	}
	if addr, err := pool.take(); err == nil {
		t.Errorf("a third address: %v", addr)
	}
	pool.release(first)
	if addr, err := pool.take(); err != nil || addr != first {
		t.Errorf("got %v, %v", addr, err)
	}
}

func TestImageCommand(t *testing.T) {
	image := Image{Entrypoint: []string{"entry"}, Args: []string{"default"}}
	for _, c := range []struct{ command, args, want []string }{
		{nil, nil, []string{"entry", "default"}},
		{nil, []string{"a"}, []string{"entry", "a"}},
		{[]string{"c"}, nil, []string{"c"}},
		{[]string{"c"}, []string{"a"}, []string{"c", "a"}},
	} {
		if got := image.command(c.command, c.args); !reflect.DeepEqual(got, c.want) {
			t.Errorf("command %v, args %v: got %v, want %v", c.command, c.args, got, c.want)
		}
	}
}

func TestImagesAreReadAnew(t *testing.T) {
	path := filepath.Join(t.TempDir(), "images.json")
	images, spec := Images(path), &runtimeapi.ImageSpec{Image: "web:1"}
	if _, err := images.find(spec); err == nil {
		t.Error("a missing file is no error")
	}
	for _, entrypoint := range []string{"one", "two"} {
		if err := os.WriteFile(path, []byte(`{"web:1": {"entrypoint": ["`+entrypoint+`"]}}`), 0o600); err != nil {
			t.Fatal(err)
		}
		if image, err := images.find(spec); err != nil || image.Entrypoint[0] != entrypoint {
			t.Errorf("got %v, %v, want %s", image, err, entrypoint)
		}
	}
	if image, err := images.find(&runtimeapi.ImageSpec{Image: "other"}); err != nil || image.Entrypoint != nil {
		t.Errorf("an image that is not in the file: %v, %v", image, err)
	}
	if _, err := Images("").find(spec); err != nil {
		t.Errorf("no file: %v", err)
	}
}

func TestLogLines(t *testing.T) {
	path := filepath.Join(t.TempDir(), "0.log")
	log := newLogFile(path)
	if err := log.open(); err != nil {
		t.Fatal(err)
	}
	out := log.stream("stdout")
	for _, text := range []string{"one\ntw", "o\n\n", strings.Repeat("x", longestLine+1) + "\n", "rest"} {
		if n, err := out.Write([]byte(text)); n != len(text) || err != nil {
			t.Fatal(n, err)
		}
	}
	log.close()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	want := []string{"F one", "F two", "F ", "P " + strings.Repeat("x", longestLine), "F x", "P rest"}
	lines := strings.Split(strings.TrimSuffix(string(data), "\n"), "\n")
	if len(lines) != len(want) {
		t.Fatalf("%d lines, want %d", len(lines), len(want))
	}
	for i, line := range lines {
		if !regexp.MustCompile(`^\S+T\S+ stdout ` + want[i] + `$`).MatchString(line) {
			t.Errorf("line %d: %.80q, want %.80q", i, line, want[i])
		}
	}
}
