package criproc

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
	internalapi "k8s.io/cri-api/pkg/apis"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Image says how an image starts. Its files are the machine's, but for those that Files names.
type Image struct {
	Entrypoint []string          `json:"entrypoint,omitempty"`
	Args       []string          `json:"args,omitempty"`
	Env        map[string]string `json:"env,omitempty"`
	WorkingDir string            `json:"workingDir,omitempty"`
	// Files are paths of the machine, by the path at which a container sees them, read-only.
	Files map[string]string `json:"files,omitempty"`
	// PullError makes pulls of the image fail with this message.
	PullError string `json:"pullError,omitempty"`
}

// Images is the path of a JSON object of images by name; empty for none. The file is read at every look, so that images
// can be added while the node runs. A name that is not in it is an image too, one that says nothing.
type Images string

func (path Images) find(spec *runtimeapi.ImageSpec) (Image, error) {
	if path == "" {
		return Image{}, nil
	}
	data, err := os.ReadFile(string(path))
	if err != nil {
		return Image{}, err
	}
	var images map[string]Image
	if err := json.Unmarshal(data, &images); err != nil {
		return Image{}, fmt.Errorf("%s: %w", string(path), err)
	}
	if image, ok := images[spec.GetUserSpecifiedImage()]; ok {
		return image, nil
	}
	return images[spec.GetImage()], nil
}

// command applies the rules of the pod API: a command replaces the image's entry point and arguments, arguments alone
// replace its arguments.
func (i Image) command(command, args []string) []string {
	switch {
	case len(command) > 0:
	case len(args) > 0:
		command = i.Entrypoint
	default:
		command, args = i.Entrypoint, i.Args
	}
	return append(append([]string(nil), command...), args...)
}

// ImageService is the CRI view of Images. It reports the file system of Dir as the one that holds the images.
type ImageService struct {
	Images Images
	Dir    string
}

var _ internalapi.ImageManagerService = (*ImageService)(nil)

// imageUser makes runAsNonRoot pass; nothing else looks at it.
const imageUser = 65532

func (s *ImageService) ImageStatus(_ context.Context, spec *runtimeapi.ImageSpec, _ bool) (*runtimeapi.ImageStatusResponse, error) {
	image, err := s.Images.find(spec)
	if err != nil {
		return nil, err
	}
	if image.PullError != "" {
		return &runtimeapi.ImageStatusResponse{}, nil // not here: the kubelet pulls it
	}
	return &runtimeapi.ImageStatusResponse{Image: &runtimeapi.Image{
		Id:       spec.Image,
		RepoTags: []string{spec.Image},
		Size:     1,
		Uid:      &runtimeapi.Int64Value{Value: imageUser},
		Spec:     spec,
	}}, nil
}

func (s *ImageService) PullImage(_ context.Context, spec *runtimeapi.ImageSpec, _ *runtimeapi.AuthConfig, _ *runtimeapi.PodSandboxConfig) (string, error) {
	image, err := s.Images.find(spec)
	if err != nil {
		return "", err
	}
	if image.PullError != "" {
		return "", errors.New(image.PullError)
	}
	return spec.Image, nil
}

func (s *ImageService) ListImages(context.Context, *runtimeapi.ImageFilter) ([]*runtimeapi.Image, error) {
	return nil, nil
}

func (s *ImageService) RemoveImage(context.Context, *runtimeapi.ImageSpec) error { return nil }

func (s *ImageService) ImageFsInfo(context.Context) (*runtimeapi.ImageFsInfoResponse, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(s.Dir, &st); err != nil {
		return nil, err
	}
	usage := []*runtimeapi.FilesystemUsage{{
		Timestamp:  time.Now().UnixNano(),
		FsId:       &runtimeapi.FilesystemIdentifier{Mountpoint: s.Dir},
		UsedBytes:  &runtimeapi.UInt64Value{},
		InodesUsed: &runtimeapi.UInt64Value{},
	}}
	return &runtimeapi.ImageFsInfoResponse{ImageFilesystems: usage, ContainerFilesystems: usage}, nil
}

func (s *ImageService) Close(context.Context) error { return nil }
