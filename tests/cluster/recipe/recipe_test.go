package recipe

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
)

func TestABuildThatFailsIsNoBuildAndTheNextOneStartsClean(t *testing.T) {
	root := t.TempDir()
	failed := errors.New("interrupted")
	err := once(context.Background(), root, "thing", "kubernetes", func(source string) error {
		os.WriteFile(filepath.Join(filepath.Dir(source), "half"), nil, 0o644)
		return failed
	})
	if !errors.Is(err, failed) {
		t.Fatalf("the error is %v", err)
	}
	built := false
	err = once(context.Background(), root, "thing", "kubernetes", func(source string) error {
		built = true
		if _, err := os.Stat(filepath.Join(filepath.Dir(source), "half")); err == nil {
			t.Error("what the interrupted build left is still there")
		}
		return nil
	})
	if err != nil || !built {
		t.Fatalf("built: %v, error: %v", built, err)
	}
}

func TestOfManyBuildersAtOnceOneBuilds(t *testing.T) {
	root := t.TempDir()
	var builds atomic.Int32
	var all sync.WaitGroup
	for range 8 {
		all.Add(1)
		go func() {
			defer all.Done()
			if err := once(context.Background(), root, "thing", "kubernetes", func(string) error {
				builds.Add(1)
				return nil
			}); err != nil {
				t.Error(err)
			}
		}()
	}
	all.Wait()
	if builds.Load() != 1 {
		t.Errorf("built %d times", builds.Load())
	}
}

func TestAnotherRecipeIsBuiltAgain(t *testing.T) {
	root := t.TempDir()
	stamp := filepath.Join(root, "thing", "stamp")
	build := func() (built bool) {
		if err := once(context.Background(), root, "thing", "kubernetes", func(string) error { built = true; return nil }); err != nil {
			t.Fatal(err)
		}
		return built
	}
	if !build() || build() {
		t.Error("built once, then up to date")
	}
	os.WriteFile(stamp, []byte("the hash of an older recipe"), 0o644)
	if !build() {
		t.Error("an older recipe is taken for this one")
	}
}

func TestOnlyVersionsAreVersions(t *testing.T) {
	for _, text := range []string{"", "1.30", "v1.30.14", "1.30.14/../..", "1.30.14 ", "2.0.0", "1.99999.0"} {
		if version, err := ParseVersion(text); err == nil {
			t.Errorf("%q is taken for %s", text, version)
		}
	}
	for _, text := range []string{DefaultVersion, StructuredVersion} {
		if version, err := ParseVersion(text); err != nil || version.String() != text {
			t.Errorf("%s is refused: %v", text, err)
		}
	}
}

func TestTheVersionsOfEveryRunArePinned(t *testing.T) {
	for _, version := range []string{DefaultVersion, StructuredVersion} {
		for _, name := range []string{"module.txt", "sums.txt"} {
			if _, err := sources.ReadFile("kubernetes/" + version + "/" + name); err != nil {
				t.Error(err)
			}
		}
	}
}

func TestAVersionsHashCoversItsOwnRequirementsOnly(t *testing.T) {
	found, err := recipeFiles(DefaultVersion, "kubernetes")
	if err != nil {
		t.Fatal(err)
	}
	for path, expected := range map[string]bool{
		"recipe.go": true, "kubernetes/main.go": true, "kubernetes/" + DefaultVersion + "/module.txt": true,
		"kubernetes/" + StructuredVersion + "/module.txt": false, "containerd/module.txt": false,
	} {
		if covered := slices.Contains(found, path); covered != expected {
			t.Errorf("%s is covered: %v", path, covered)
		}
	}
}
