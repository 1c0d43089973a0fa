// Command kubelet_types calls the APIs with kubelet's own types, over connections made as kubelet makes them, and reads every field of each
// answer: it panics where kubelet would panic.
//
//	kubelet_types registration SOCKET
//	kubelet_types dra SOCKET
//	kubelet_types deviceplugin SOCKET
//
// Each answer is printed as one line: the call, a space, and the decoded message as JSON.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	deviceplugin "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	dra2 "k8s.io/kubelet/pkg/apis/dra/v1alpha2"
	dra3 "k8s.io/kubelet/pkg/apis/dra/v1alpha3"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

func main() {
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "usage: kubelet_types registration|dra|deviceplugin SOCKET")
		os.Exit(2)
	}
	calls := map[string]func(context.Context, string){
		"registration": callRegistration, "dra": callDra, "deviceplugin": callDevicePlugin,
	}
	call, known := calls[os.Args[1]]
	if !known {
		fmt.Fprintf(os.Stderr, "kubelet_types: unknown API %q\n", os.Args[1])
		os.Exit(2)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	call(ctx, os.Args[2])
}

// dial connects as kubelet 1.30 does: to the bare path, which also becomes the authority unless another is given.
func dial(ctx context.Context, socket string, options ...grpc.DialOption) *grpc.ClientConn {
	options = append(options, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithBlock(),
		grpc.WithContextDialer(func(ctx context.Context, path string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", path)
		}))
	connection, err := grpc.DialContext(ctx, socket, options...)
	if err != nil {
		fmt.Fprintf(os.Stderr, "kubelet_types: %s: %v\n", socket, err)
		os.Exit(1)
	}
	return connection
}

// show prints an answer, or code and message of an error.
func show(call string, answer any, err error) {
	if err != nil {
		refused := status.Convert(err)
		fmt.Printf("%s %s: %s\n", call, refused.Code(), refused.Message())
		return
	}
	line, err := json.Marshal(answer)
	if err != nil {
		panic(err)
	}
	fmt.Println(call, string(line))
}

func callRegistration(ctx context.Context, socket string) {
	client := registration.NewRegistrationClient(dial(ctx, socket))
	info, err := client.GetInfo(ctx, &registration.InfoRequest{})
	show("GetInfo", info, err)
	told, err := client.NotifyRegistrationStatus(ctx, &registration.RegistrationStatus{PluginRegistered: true})
	show("NotifyRegistrationStatus", told, err)
}

func callDra(ctx context.Context, socket string) {
	connection := dial(ctx, socket)
	newer, older := dra3.NewNodeClient(connection), dra2.NewNodeClient(connection)

	claims := []*dra3.Claim{
		{Namespace: "default", Uid: "u-1", Name: "one", ResourceHandle: "h"},
		{Namespace: "default", Uid: "u-2", Name: "refuse", ResourceHandle: "h"},
	}
	prepared, err := newer.NodePrepareResources(ctx, &dra3.NodePrepareResourcesRequest{Claims: claims})
	if err == nil {
		for uid, result := range prepared.Claims {
			// Kubelet reads these fields without a nil check.
			fmt.Printf("prepared %s: %v %q\n", uid, result.CDIDevices, result.Error)
		}
	}
	show("NodePrepareResources", prepared, err)

	unprepared, err := newer.NodeUnprepareResources(ctx, &dra3.NodeUnprepareResourcesRequest{Claims: claims})
	if err == nil {
		for uid, result := range unprepared.Claims {
			fmt.Printf("unprepared %s: %q\n", uid, result.Error)
		}
	}
	show("NodeUnprepareResources", unprepared, err)

	for _, claim := range claims {
		prepared, err := older.NodePrepareResource(ctx, &dra2.NodePrepareResourceRequest{
			Namespace: claim.Namespace, ClaimUid: claim.Uid, ClaimName: claim.Name, ResourceHandle: claim.ResourceHandle,
		})
		show("NodePrepareResource", prepared, err)
		unprepared, err := older.NodeUnprepareResource(ctx, &dra2.NodeUnprepareResourceRequest{
			Namespace: claim.Namespace, ClaimUid: claim.Uid, ClaimName: claim.Name, ResourceHandle: claim.ResourceHandle,
		})
		show("NodeUnprepareResource", unprepared, err)
	}

	// Kubelet 1.30 also calls this, and stops if it is not implemented.
	stream, err := newer.NodeListAndWatchResources(ctx, &dra3.NodeListAndWatchResourcesRequest{})
	if err == nil {
		_, err = stream.Recv()
	}
	show("NodeListAndWatchResources", nil, err)
}

func callDevicePlugin(ctx context.Context, socket string) {
	client := deviceplugin.NewDevicePluginClient(dial(ctx, socket, grpc.WithAuthority("localhost")))
	options, err := client.GetDevicePluginOptions(ctx, &deviceplugin.Empty{})
	show("GetDevicePluginOptions", options, err)

	stream, err := client.ListAndWatch(ctx, &deviceplugin.Empty{})
	if err == nil {
		var list *deviceplugin.ListAndWatchResponse
		list, err = stream.Recv()
		show("ListAndWatch", list, err)
	} else {
		show("ListAndWatch", nil, err)
	}

	choice, err := client.GetPreferredAllocation(ctx, &deviceplugin.PreferredAllocationRequest{
		ContainerRequests: []*deviceplugin.ContainerPreferredAllocationRequest{
			{AvailableDeviceIDs: []string{"a", "b", "c"}, MustIncludeDeviceIDs: []string{"b"}, AllocationSize: 2},
		},
	})
	show("GetPreferredAllocation", choice, err)

	for _, ids := range [][]string{{"a"}, {"refuse"}} {
		allocated, err := client.Allocate(ctx, &deviceplugin.AllocateRequest{
			ContainerRequests: []*deviceplugin.ContainerAllocateRequest{{DevicesIDs: ids}},
		})
		show("Allocate", allocated, err)
		started, err := client.PreStartContainer(ctx, &deviceplugin.PreStartContainerRequest{DevicesIDs: ids})
		show("PreStartContainer", started, err)
	}
}
