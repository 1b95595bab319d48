// A small controller over gRPC: go run ./grpc HOST:PORT KEY_FILE CERTIFICATE
package main

import (
	"context"
	"fmt"
	"log"
	"os"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"

	pb "example.com/controller/pb"
)

const config = `{
  "inbounds": [{"tag": "in", "listen": "127.0.0.1", "port": 21443, "protocol": "vless",
                "settings": {"clients": [], "decryption": "none"}}],
  "outbounds": [{"tag": "direct", "protocol": "freedom"}]
}`

// Key is sent with each call.
type Key string

func (k Key) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	return map[string]string{"authorization": "Bearer " + string(k)}, nil
}

func (Key) RequireTransportSecurity() bool { return true }

// user is a user in these inbounds. Without any it removes the user.
func user(name, id string, inbounds ...string) *pb.User {
	account := &pb.Proxy{Vless: &pb.Vless{Id: id}}
	return &pb.User{Email: name, Proxies: account, Inbounds: inbounds}
}

func main() {
	address, keyFile, certificate := os.Args[1], os.Args[2], os.Args[3]
	key, err := os.ReadFile(keyFile)
	check(err)
	pinned, err := credentials.NewClientTLSFromFile(certificate, "")
	check(err)
	mine := grpc.WithPerRPCCredentials(Key(strings.TrimSpace(string(key))))
	connection, err := grpc.NewClient(address, grpc.WithTransportCredentials(pinned), mine)
	check(err)
	defer connection.Close()
	node := pb.NewNodeServiceClient(connection)
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()

	// Safe to repeat: an equal Start disconnects no user.
	alice := user("alice", "5783a3e7-e373-51cd-8642-c83782b807c5", "in")
	backend := &pb.Backend{Type: pb.BackendType_XRAY, Config: config, Users: []*pb.User{alice}}
	info, err := node.Start(ctx, backend)
	check(err)
	fmt.Println("started", info.CoreType, info.State)

	bob := "f81d4fae-7dec-11d0-a765-00a0c91e6bf6"
	check(sync(ctx, node, user("bob", bob, "in")))
	if err := sync(ctx, node, user("a>>>b", bob, "in")); err != nil {
		// status.Convert(err).Message() has the reason, for people.
		fmt.Println("refused", status.Code(err))
	}
	check(sync(ctx, node, user("bob", bob)))
	users, err := node.ListUsers(ctx, &pb.ListUsersRequest{})
	check(err)
	for _, row := range users.Users {
		fmt.Println("user", row.Name)
	}

	// Each byte is in exactly one reply with reset: add them up.
	stats, err := node.GetStats(ctx, &pb.StatRequest{Type: pb.StatType_UsersStat, Reset_: true})
	check(err)
	for _, row := range stats.Stats {
		fmt.Println("bytes", row.Name, row.Type, row.Value)
	}

	// Keep sequence and epoch of the last event, and go on after it next time.
	events, err := node.StreamEvents(ctx, &pb.EventsRequest{Kinds: []string{"backend"}})
	check(err)
	last := &pb.Event{}
	for event, err := events.Recv(); err == nil; event, err = events.Recv() {
		last = event
	}
	fmt.Println("event", last.Kind)
	logs, err := node.GetLogs(ctx, &pb.Empty{})
	check(err)
	line, err := logs.Recv()
	check(err)
	fmt.Println("log", strings.Fields(line.Detail)[0])

	_, err = node.Stop(ctx, &pb.Empty{})
	check(err)
	info, err = node.GetBaseInfo(ctx, &pb.Empty{})
	check(err)
	fmt.Println("stopped", info.State)
}

// sync sends one user. A controller with many changes keeps the stream open.
func sync(ctx context.Context, node pb.NodeServiceClient, user *pb.User) error {
	stream, err := node.SyncUser(ctx)
	if err != nil {
		return err
	}
	if err := stream.Send(user); err != nil {
		return err
	}
	_, err = stream.CloseAndRecv()
	return err
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
