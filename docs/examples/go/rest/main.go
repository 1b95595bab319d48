// A small controller over REST: go run ./rest HOST:PORT KEY_FILE CERTIFICATE
package main

import (
	"bufio"
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"os"
	"strings"
	"time"

	"google.golang.org/protobuf/encoding/protodelim"
	"google.golang.org/protobuf/proto"

	pb "example.com/controller/pb"
)

const config = `{
  "inbounds": [{"tag": "in", "listen": "127.0.0.1", "port": 21443, "protocol": "vless",
                "settings": {"clients": [], "decryption": "none"}}],
  "outbounds": [{"tag": "direct", "protocol": "freedom"}]
}`

// Refusal is an error of the node. Code is a word that stays the same, Text is for people.
type Refusal struct {
	Status int
	Code   string `json:"code"`
	Text   string `json:"error"`
}

func (r *Refusal) Error() string { return fmt.Sprintf("%d %s: %s", r.Status, r.Code, r.Text) }

type Node struct {
	base, key string
	client    *http.Client
}

// open sends a request. The reply's body is the caller's to close.
func (n *Node) open(client *http.Client, verb, path string, request proto.Message) (io.ReadCloser, error) {
	body, err := proto.Marshal(request)
	if err != nil {
		return nil, err
	}
	r, err := http.NewRequest(verb, n.base+path, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	r.Header.Set("Authorization", "Bearer "+n.key)
	r.Header.Set("Content-Type", "application/x-protobuf")
	reply, err := client.Do(r)
	if err != nil {
		return nil, err
	}
	if reply.StatusCode != http.StatusOK {
		defer reply.Body.Close()
		refusal := &Refusal{Status: reply.StatusCode}
		json.NewDecoder(reply.Body).Decode(refusal)
		return nil, refusal
	}
	return reply.Body, nil
}

// call calls an operation, and fills in the reply.
func (n *Node) call(verb, path string, request, reply proto.Message) error {
	body, err := n.open(n.client, verb, path, request)
	if err != nil {
		return err
	}
	defer body.Close()
	content, err := io.ReadAll(body)
	if err != nil {
		return err
	}
	return proto.Unmarshal(content, reply)
}

// user is a user in these inbounds. Without any it removes the user.
func user(name, id string, inbounds ...string) *pb.User {
	account := &pb.Proxy{Vless: &pb.Vless{Id: id}}
	return &pb.User{Email: name, Proxies: account, Inbounds: inbounds}
}

func main() {
	address, keyFile, certificate := os.Args[1], os.Args[2], os.Args[3]
	key, err := os.ReadFile(keyFile)
	check(err)
	pem, err := os.ReadFile(certificate)
	check(err)
	pinned := x509.NewCertPool()
	pinned.AppendCertsFromPEM(pem)
	transport := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pinned}}
	client := &http.Client{Transport: transport, Timeout: 20 * time.Second}
	node := &Node{"https://" + address, strings.TrimSpace(string(key)), client}
	none := &pb.Empty{}

	// Safe to repeat: an equal Start disconnects no user.
	alice := user("alice", "5783a3e7-e373-51cd-8642-c83782b807c5", "in")
	info := &pb.BaseInfoResponse{}
	backend := &pb.Backend{Type: pb.BackendType_XRAY, Config: config, Users: []*pb.User{alice}}
	check(node.call("POST", "/start", backend, info))
	fmt.Println("started", info.CoreType, info.State)

	bob := "f81d4fae-7dec-11d0-a765-00a0c91e6bf6"
	check(node.call("PUT", "/user/sync", user("bob", bob, "in"), none))
	var refusal *Refusal
	if errors.As(node.call("PUT", "/user/sync", user("a>>>b", bob, "in"), none), &refusal) {
		fmt.Println("refused", refusal.Code)
	}
	check(node.call("PUT", "/user/sync", user("bob", bob), none))
	users := &pb.ListUsersResponse{}
	check(node.call("GET", "/users", &pb.ListUsersRequest{}, users))
	for _, row := range users.Users {
		fmt.Println("user", row.Name)
	}

	// Each byte is in exactly one reply with reset: add them up.
	stats := &pb.StatResponse{}
	check(node.call("GET", "/stats", &pb.StatRequest{Type: pb.StatType_UsersStat, Reset_: true}, stats))
	for _, row := range stats.Stats {
		fmt.Println("bytes", row.Name, row.Type, row.Value)
	}

	// Messages, each after its length. Keep sequence and epoch of the last one, and go on after it next time.
	events, err := node.open(client, "GET", "/events", &pb.EventsRequest{Kinds: []string{"backend"}})
	check(err)
	reader, last := bufio.NewReader(events), &pb.Event{}
	for err == nil {
		event := &pb.Event{}
		if err = protodelim.UnmarshalFrom(reader, event); err == nil && event.Kind != "" {
			last = event
		}
	}
	events.Close()
	fmt.Println("event", last.Kind)

	// Server-Sent Events; a stream that follows has no deadline.
	lines, err := node.open(&http.Client{Transport: transport}, "GET", "/logs", none)
	check(err)
	for scanner := bufio.NewScanner(lines); scanner.Scan(); {
		if line, found := strings.CutPrefix(scanner.Text(), "data: "); found {
			fmt.Println("log", strings.Fields(line)[0])
			break
		}
	}
	lines.Close()

	check(node.call("PUT", "/stop", none, none))
	check(node.call("GET", "/info", none, info))
	fmt.Println("stopped", info.State)
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
