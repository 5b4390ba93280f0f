// A client of Sparserow in Go: looks rows of a served model up, and, when a gateway is named, reads and trains rows of
// the cluster. docs/other-languages/README.md has the commands that build it.
//
//	client -serving 127.0.0.1:7100 -model ctr -table user -keys 17,18
//	client -gateway 127.0.0.1:7200 -namespace ads -table user -keys 17,18 -push 0.5
package main

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"flag"
	"fmt"
	"log"
	"math"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"example/sparserow"
)

func main() {
	serving := flag.String("serving", "", "HOST:PORT of a serving process")
	model := flag.String("model", "ctr", "NAME[@ALIAS|@VERSION] that is served")
	gateway := flag.String("gateway", "", "HOST:PORT of a gateway to a training cluster")
	namespace := flag.String("namespace", "default", "of the tables, at the gateway")
	table := flag.String("table", "user", "name of the table")
	keys := flag.String("keys", "1,2,3", "with commas")
	push := flag.Float64("push", 0, "a gradient that is pushed for every weight of the keys; 0: none")
	flag.Parse()
	wanted := parseKeys(*keys)
	if *serving != "" {
		lookup(*serving, *model, *table, wanted)
	}
	if *gateway != "" {
		train(*gateway, *namespace, *table, wanted, float32(*push))
	}
}

func lookup(address, model, table string, keys []uint64) {
	connection := dial(address)
	defer connection.Close()
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	reply, err := sparserow.NewServingClient(connection).Lookup(ctx, &sparserow.LookupRequest{
		Model:      model,
		Tables:     []*sparserow.TableKeys{{Table: table, Keys: keys}},
		DeadlineMs: 500, // what is not there by then is marked as not answered
	})
	if err != nil {
		log.Fatal(err)
	}
	found := reply.Tables[0]
	rows := decode(found.Rows, int(found.Dim))
	fmt.Printf("model %s version %d, dense weights %d\n", model, reply.Version, reply.DenseVersion)
	for i, key := range keys {
		fmt.Printf("%d: %v found %v answered %v\n", key, rows[i], found.Found[i] == 1, found.Answered[i] == 1)
	}
	for _, problem := range reply.Problems {
		fmt.Println("partial:", problem)
	}
}

func train(address, namespace, table string, keys []uint64, gradient float32) {
	connection := dial(address)
	defer connection.Close()
	rows := sparserow.NewRowsClient(connection)
	dim := show(rows, namespace, table, keys)
	if gradient == 0 {
		return
	}
	client := &pusher{rows: rows, name: newName()}
	gradients := make([]float32, len(keys)*dim)
	for i := range gradients {
		gradients[i] = gradient
	}
	if err := client.push(namespace, table, keys, gradients); err != nil {
		log.Fatal(err)
	}
	show(rows, namespace, table, keys)
}

func show(rows sparserow.RowsClient, namespace, table string, keys []uint64) int {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	reply, err := rows.Pull(ctx, &sparserow.PullRowsRequest{Namespace: namespace, Table: table, Keys: keys})
	if err != nil {
		log.Fatal(err)
	}
	for i, row := range decode(reply.Rows, int(reply.Dim)) {
		fmt.Printf("%d: %v trained %v\n", keys[i], row, reply.Found[i] == 1)
	}
	return int(reply.Dim)
}

// pusher numbers pushes, and repeats one under its number until it is answered: it is applied once.
type pusher struct {
	rows     sparserow.RowsClient
	name     string
	sequence uint64
}

func (p *pusher) push(namespace, table string, keys []uint64, gradients []float32) error {
	request := &sparserow.PushRowsRequest{
		Client:    p.name,
		Sequence:  p.sequence + 1,
		Namespace: namespace,
		Table:     table,
		Keys:      keys,
		Grads:     encode(gradients),
	}
	for try := 0; ; try++ {
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		_, err := p.rows.Push(ctx, request)
		cancel()
		switch code := status.Code(err); {
		case err == nil:
			p.sequence++
			return nil
		case (code == codes.Unavailable || code == codes.DeadlineExceeded) && try < 5:
			time.Sleep(time.Duration(1<<try) * 100 * time.Millisecond)
		default:
			return err
		}
	}
}

// dial connects without TLS. WithInsecure is in every 1.x of grpc-go; newer ones have credentials/insecure beside it.
func dial(address string) *grpc.ClientConn {
	connection, err := grpc.Dial(address, grpc.WithInsecure())
	if err != nil {
		log.Fatal(err)
	}
	return connection
}

// decode gives the rows of (n, dim) float32, little-endian.
func decode(data []byte, dim int) [][]float32 {
	rows := make([][]float32, len(data)/4/dim)
	for i := range rows {
		rows[i] = make([]float32, dim)
		for c := range rows[i] {
			rows[i][c] = math.Float32frombits(binary.LittleEndian.Uint32(data[4*(i*dim+c):]))
		}
	}
	return rows
}

func encode(values []float32) []byte {
	data := make([]byte, 4*len(values))
	for i, value := range values {
		binary.LittleEndian.PutUint32(data[4*i:], math.Float32bits(value))
	}
	return data
}

func parseKeys(text string) []uint64 {
	var keys []uint64
	for _, part := range strings.Split(text, ",") {
		key, err := strconv.ParseUint(part, 10, 64)
		if err != nil {
			log.Fatalf("-keys: %q is no key: allowed: integers in [0, 2**64)", part)
		}
		keys = append(keys, key)
	}
	return keys
}

func newName() string {
	var random [16]byte
	if _, err := rand.Read(random[:]); err != nil {
		log.Fatal(err)
	}
	return hex.EncodeToString(random[:])
}
