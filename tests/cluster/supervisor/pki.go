package supervisor

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"time"
)

// authority is the cluster's certificate authority. All clients of the API server authenticate by its certificates, so that users can be
// added at any time, and no token can be guessed.
type authority struct {
	directory   string
	key         *ecdsa.PrivateKey
	certificate *x509.Certificate
	encoded     []byte
}

func newAuthority(directory string) (*authority, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	template := template("drayman-test-cluster")
	template.IsCA, template.BasicConstraintsValid = true, true
	template.KeyUsage = x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, err
	}
	certificate, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, err
	}
	a := &authority{directory, key, certificate, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})}
	if err := os.MkdirAll(directory, 0o700); err != nil {
		return nil, err
	}
	return a, os.WriteFile(a.path("ca.crt"), a.encoded, 0o600)
}

func (a *authority) path(name string) string { return filepath.Join(a.directory, name) }

// issue returns a certificate and its key, PEM-encoded.
func (a *authority) issue(user string, groups []string, addresses []net.IP, names []string) (certificate, key []byte, err error) {
	private, key, err := newKey()
	if err != nil {
		return nil, nil, err
	}
	template := template(user)
	template.Subject.Organization = groups
	template.IPAddresses, template.DNSNames = addresses, names
	template.KeyUsage = x509.KeyUsageDigitalSignature
	template.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth}
	der, err := x509.CreateCertificate(rand.Reader, template, a.certificate, private.Public(), a.key)
	if err != nil {
		return nil, nil, err
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), key, nil
}

// newKey returns a key, also PEM-encoded.
func newKey() (*ecdsa.PrivateKey, []byte, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, err
	}
	encoded, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return nil, nil, err
	}
	return key, pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: encoded}), nil
}

// issueFiles writes name.crt and name.key.
func (a *authority) issueFiles(name, user string, groups []string, addresses []net.IP, names []string) error {
	certificate, key, err := a.issue(user, groups, addresses, names)
	if err != nil {
		return err
	}
	if err := os.WriteFile(a.path(name+".crt"), certificate, 0o600); err != nil {
		return err
	}
	return os.WriteFile(a.path(name+".key"), key, 0o600)
}

// serviceAccountKeys writes the keys that sign and verify service account tokens.
func (a *authority) serviceAccountKeys() error {
	key, private, err := newKey()
	if err != nil {
		return err
	}
	public, err := x509.MarshalPKIXPublicKey(key.Public())
	if err != nil {
		return err
	}
	if err := os.WriteFile(a.path("sa.key"), private, 0o600); err != nil {
		return err
	}
	return os.WriteFile(a.path("sa.pub"), pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: public}), 0o600)
}

// kubeconfig writes a self-contained configuration that can be copied.
func (a *authority) kubeconfig(path, server, user string, groups []string) error {
	certificate, key, err := a.issue(user, groups, nil, nil)
	if err != nil {
		return err
	}
	encode := base64.StdEncoding.EncodeToString
	return os.WriteFile(path, []byte(fmt.Sprintf(`apiVersion: v1
kind: Config
clusters:
- name: drayman-test
  cluster: {server: %q, certificate-authority-data: %s}
users:
- name: %q
  user: {client-certificate-data: %s, client-key-data: %s}
contexts:
- name: drayman-test
  context: {cluster: drayman-test, user: %q}
current-context: drayman-test
`, server, encode(a.encoded), user, encode(certificate), encode(key), user)), 0o600)
}

func template(name string) *x509.Certificate {
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 100))
	if err != nil {
		panic(err) // crypto/rand does not fail
	}
	now := time.Now()
	return &x509.Certificate{
		SerialNumber: serial, Subject: pkix.Name{CommonName: name},
		// Valid from the day before, in case the clock is wrong; long enough for `make cluster`.
		NotBefore: now.Add(-24 * time.Hour), NotAfter: now.Add(30 * 24 * time.Hour),
	}
}
