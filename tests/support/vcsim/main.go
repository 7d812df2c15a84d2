// A vCenter or an ESXi host, simulated: vcsim with one scenario (scenario.go, lease.go).

package main

import (
	"crypto/tls"
	"flag"
	"fmt"
	"log"
	"net/http"
	"net/url"

	"github.com/vmware/govmomi/simulator"
)

func main() {
	listen := flag.String("listen", "127.0.0.1:0", "host and port")
	user := flag.String("user", "", "who may log in")
	password := flag.String("password", "", "with what")
	certificate := flag.String("certificate", "", "PEM file")
	key := flag.String("key", "", "PEM file")
	isESX := flag.Bool("esx", false, "an ESXi host instead of a vCenter")
	scenario := flag.String("scenario", "", "JSON file")
	flag.Parse()

	model := simulator.VPX()
	if *isESX {
		model = simulator.ESX()
	}
	model.Machine = 1
	if err := model.Create(); err != nil {
		log.Fatal(err)
	}
	if err := simulator.Play(*scenario); err != nil {
		log.Fatal(err)
	}
	pair, err := tls.LoadX509KeyPair(*certificate, *key)
	if err != nil {
		log.Fatal(err)
	}
	model.Service.TLS = &tls.Config{Certificates: []tls.Certificate{pair}}
	model.Service.Listen = &url.URL{Host: *listen, User: url.UserPassword(*user, *password)}
	model.Service.ServeMux = http.NewServeMux()
	model.Service.ServeMux.HandleFunc("/ha-nfc/", simulator.ServeBehind)
	fmt.Println(model.Service.NewServer().URL)
	select {}
}
