package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sort"

	"golang.org/x/sys/unix"

	"twinpool.dev/localcluster/node/internal/initspec"
)

// tree is the file tree of a container: the machine's, with the container's mounts put in. A mount point that the
// machine lacks is never created on its disk: the nearest existing directory is replaced, in this mount namespace
// only, by a tmpfs that has all of the directory's entries bound into it, and there is room for the new one.
type tree struct {
	stage string
	// ours are directories on such a tmpfs.
	ours map[string]bool
}

func buildTree(spec initspec.Container) error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("private mounts: %w", err)
	}
	// Refused where /proc is partly masked, as in most containers; the machine's /proc does then.
	_ = unix.Mount("proc", "/proc", "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "")

	t := &tree{stage: spec.Stage, ours: map[string]bool{}}
	mounts := append([]initspec.Mount(nil), spec.Mounts...)
	sort.SliceStable(mounts, func(i, j int) bool { return mounts[i].Target < mounts[j].Target }) // parents first
	for _, m := range mounts {
		if err := t.add(m); err != nil {
			return fmt.Errorf("mount %s at %s: %w", m.Source, m.Target, err)
		}
	}
	return nil
}

func (t *tree) add(m initspec.Mount) error {
	info, err := os.Stat(m.Source)
	if err != nil {
		return err
	}
	target, err := t.mountPoint(m.Target, info.IsDir())
	if err != nil {
		return err
	}
	if err := unix.Mount(m.Source, target, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("bind: %w", err)
	}
	if m.ReadOnly {
		return remountReadOnly(target)
	}
	return nil
}

// mountPoint returns target without symbolic links, after making it if need be.
func (t *tree) mountPoint(target string, isDir bool) (string, error) {
	existing, missing, err := split(filepath.Clean(target))
	if err != nil || len(missing) == 0 {
		return existing, err
	}
	if !t.ours[existing] {
		if err := t.replace(existing); err != nil {
			return "", fmt.Errorf("make room in %s: %w", existing, err)
		}
	}
	path := existing
	for i, name := range missing {
		path = filepath.Join(path, name)
		if i == len(missing)-1 && !isDir {
			return path, os.WriteFile(path, nil, 0o644)
		}
		if err := os.Mkdir(path, 0o755); err != nil {
			return "", err
		}
		t.ours[path] = true
	}
	return path, nil
}

// split divides path into its longest existing part, resolved, and the names after it.
func split(path string) (existing string, missing []string, err error) {
	for {
		existing, err = filepath.EvalSymlinks(path)
		if !errors.Is(err, fs.ErrNotExist) {
			return existing, missing, err
		}
		missing = append([]string{filepath.Base(path)}, missing...)
		path = filepath.Dir(path)
	}
}

// replace puts a tmpfs with the same entries in the place of dir.
func (t *tree) replace(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	if err := unix.Mount("tmpfs", t.stage, "tmpfs", 0, "mode=0755"); err != nil {
		return fmt.Errorf("tmpfs: %w", err)
	}
	for _, entry := range entries {
		from, to := filepath.Join(dir, entry.Name()), filepath.Join(t.stage, entry.Name())
		if err := copyEntry(from, to, entry); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	t.ours[dir] = true
	if dir != "/" {
		return unix.Mount(t.stage, dir, "", unix.MS_MOVE, "")
	}
	if err := os.Chdir(t.stage); err != nil {
		return err
	}
	if err := unix.Mount(".", "/", "", unix.MS_MOVE, ""); err != nil {
		return err
	}
	return unix.Chroot(".")
}

func copyEntry(from, to string, entry fs.DirEntry) error {
	switch {
	case entry.Type()&fs.ModeSymlink != 0:
		link, err := os.Readlink(from)
		if err != nil {
			return err
		}
		return os.Symlink(link, to)
	case entry.IsDir():
		if err := os.Mkdir(to, 0o755); err != nil {
			return err
		}
	default:
		if err := os.WriteFile(to, nil, 0o644); err != nil {
			return err
		}
	}
	if err := unix.Mount(from, to, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("bind %s: %w", from, err)
	}
	return nil
}

// remountReadOnly keeps the flags that the mount has: in a user namespace they must not be dropped.
func remountReadOnly(path string) error {
	var st unix.Statfs_t
	if err := unix.Statfs(path, &st); err != nil {
		return err
	}
	flags := uintptr(st.Flags) & (unix.ST_NOSUID | unix.ST_NODEV | unix.ST_NOEXEC | unix.ST_NOATIME | unix.ST_NODIRATIME)
	if st.Flags&unix.ST_RELATIME != 0 {
		flags |= unix.MS_RELATIME
	}
	if err := unix.Mount("", path, "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY|flags, ""); err != nil {
		return fmt.Errorf("read-only: %w", err)
	}
	return nil
}
