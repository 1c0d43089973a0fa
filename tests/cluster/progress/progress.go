// Package progress tells a person at a terminal that long work goes on.
package progress

import (
	"fmt"
	"os"
	"time"
)

// Show writes a name and how long the work already takes to standard error, each second until end is called. Without a terminal that
// can redraw a line it writes nothing.
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
				// The cursor returns to the start of the line, so that whatever else is written replaces it.
				fmt.Fprintf(os.Stderr, "%s: %s\x1b[K\r", name, time.Since(begun).Round(time.Second))
			}
		}
	}()
	return func() {
		close(ended)
		<-erased
	}
}
