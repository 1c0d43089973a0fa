// Package progress shows the progress of long operations in a terminal.
package progress

import (
	"fmt"
	"os"
	"time"
)

// Show prints a name and the elapsed time to standard error each second until end is called. It prints nothing if the terminal cannot
// redraw lines.
func Show(name string) (end func()) {
	info, err := os.Stderr.Stat()
	terminal := os.Getenv("TERM")
	if err != nil || info.Mode()&os.ModeCharDevice == 0 || terminal == "" || terminal == "dumb" {
		return func() {}
	}
	ended, erased := make(chan struct{}), make(chan struct{})
	begun := time.Now()
	go func() {
		defer close(erased)
		ticks := time.NewTicker(time.Second)
		defer ticks.Stop()
		for {
			select {
			case <-ended:
				fmt.Fprint(os.Stderr, "\x1b[K")
				return
			case <-ticks.C:
				// The cursor returns to the start of the line, so that the next output overwrites it.
				fmt.Fprintf(os.Stderr, "%s: %s\x1b[K\r", name, time.Since(begun).Round(time.Second))
			}
		}
	}()
	return func() {
		close(ended)
		<-erased
	}
}
