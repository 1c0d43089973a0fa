// Opens /dev/kvm and prints its API version, or the error.
package main

import (
	"fmt"
	"os"
	"syscall"
)

// KVM_GET_API_VERSION of linux/kvm.h: _IO(0xAE, 0x00).
const getAPIVersion = 0xAE00

func main() {
	device, err := os.OpenFile("/dev/kvm", os.O_RDWR, 0)
	if err != nil {
		fmt.Println(err)
		return
	}
	version, _, errno := syscall.Syscall(syscall.SYS_IOCTL, device.Fd(), getAPIVersion, 0)
	if errno != 0 {
		fmt.Println(errno)
		return
	}
	fmt.Println(version)
}
