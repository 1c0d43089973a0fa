package supervisor

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
)

// A slot is a block of ports and addresses for one cluster on the machine. It is held by an abstract Unix socket, which the kernel frees
// when the process dies and which leaves no file.
type slot struct {
	number int
	holder net.Listener
}

const (
	slots = 1000
	// Below Linux's range of ephemeral ports, so that outgoing connections cannot conflict.
	firstPort    = 21000
	portsPerSlot = 8
	// Each node has one address of the slot's block; the first is the machine's side.
	addressesPerSlot = 64
	maxNodes         = addressesPerSlot - 3
)

// The range reserved by RFC 2544 for network tests, so that it cannot hide a real network.
var firstAddress = netip.MustParseAddr("198.18.0.0")

func takeSlot() (*slot, error) {
	for number := range slots {
		holder, err := net.Listen("unix", fmt.Sprintf("@drayman-test-cluster-%d", number))
		if err != nil {
			continue
		}
		taken := &slot{number, holder}
		if taken.portsAreFree() {
			return taken, nil
		}
		holder.Close()
	}
	return nil, errors.New("no block of free ports is left for a test cluster: end other test clusters")
}

func (s *slot) portsAreFree() bool {
	for i := range portsPerSlot {
		listener, err := net.Listen("tcp", fmt.Sprintf(":%d", s.port(i)))
		if err != nil {
			return false
		}
		listener.Close()
	}
	return true
}

func (s *slot) port(i int) int { return firstPort + s.number*portsPerSlot + i }

// address returns the machine's side of the links for 0, and the nodes' addresses from 1 on.
func (s *slot) address(i int) netip.Addr {
	bytes := firstAddress.As4()
	offset := s.number*addressesPerSlot + 1 + i
	bytes[1] += byte(offset >> 16)
	bytes[2] += byte(offset >> 8)
	bytes[3] += byte(offset)
	return netip.AddrFrom4(bytes)
}

// link returns the interface name of the machine's side of a link (at most 15 bytes).
func (s *slot) link(node int) string { return fmt.Sprintf("drayman%d-%d", s.number, node) }
