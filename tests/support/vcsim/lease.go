// Export leases of vcsim, which the simulator has for imports only, and snapshots as vSphere makes them.

package simulator

import (
	"crypto/tls"
	"encoding/json"
	"fmt"
	"math"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/vmware/govmomi/vim25/methods"
	"github.com/vmware/govmomi/vim25/mo"
	"github.com/vmware/govmomi/vim25/soap"
	"github.com/vmware/govmomi/vim25/types"
)

// How often it is looked whether a lease has ended.
const watchEvery = 20 * time.Millisecond

type fault struct {
	Name string
	// So often; 0: always.
	Times int
}

type device struct {
	// After the machine, as vSphere writes it: "ParaVirtualSCSIController0:0".
	Key       string
	ImportKey string
	// {id} is the lease's.
	URL        string
	Thumbprint string
	Disk       bool
	// An independent disk, which snapshots lack.
	Independent bool
	TargetID    string
	Size        int64
}

type entry struct {
	// As that of a device.
	Key                 string
	SHA1, SHA256        string
	Size                int64
	Disk                bool
	Capacity, Populated int64
}

// leases is what the scenario says about them.
type leases struct {
	// Seconds without a report of progress, after which a lease ends.
	Timeout float64
	// What a lease states instead, in seconds; 0: the same.
	Stated int32
	// How many reads of a lease find it initializing.
	Initializing int
	// The fault that it ends with meanwhile.
	Fails string
	// Privileges that the user has not.
	Denied []string
	// By method; CreateSnapshot and RemoveSnapshot are the tasks, whose methods end with _Task.
	Faults map[string]fault
	// How a lease ends that another client has ended: error, done or gone.
	Ends string
	// The API is older than 6.7, or than 4.1.
	NoChecksumType, NoManifest bool
	// Seconds of a snapshot's task.
	Task float64
	// In vSphere's order.
	Devices []device
	// By the lease's id.
	Manifests map[string][]entry
	// The server that is behind a URL with * as its host.
	Behind string
}

// ExportLease is a lease of one machine.
type ExportLease struct {
	mo.HttpNfcLease
	// What its URLs name: the snapshot that it exports, or "current", and its number.
	id       string
	exported types.ManagedObjectReference
	registry *Registry
	reported time.Time
	reads    int
	sha256   map[string]bool
}

var (
	leaseLock sync.Mutex
	held      *ExportLease
	number    int
	// Of the methods.
	faulted = map[string]int{}
	// Snapshots that were made here, the oldest first.
	taken []types.ManagedObjectReference
	// Of the log.
	logLock sync.Mutex
)

// record writes a line of the log of calls beside the scenario.
func record(line map[string]interface{}) {
	logLock.Lock()
	defer logLock.Unlock()
	line["at"] = float64(time.Now().UnixNano()) / 1e9
	text, _ := json.Marshal(line)
	path := filepath.Join(filepath.Dir(scenarioPath), "calls.log")
	file, err := os.OpenFile(path, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		panic(err)
	}
	defer file.Close()
	_, _ = file.Write(append(text, '\n'))
}

// named makes a fault of vSphere by its name, for an object.
func named(name string, of types.ManagedObjectReference) types.BaseMethodFault {
	switch name {
	case "NotAuthenticated":
		return &types.NotAuthenticated{NoPermission: types.NoPermission{Object: of, PrivilegeId: "System.View"}}
	case "NoPermission":
		return &types.NoPermission{Object: of, PrivilegeId: "System.View"}
	case "InvalidPowerState":
		return &types.InvalidPowerState{ExistingState: types.VirtualMachinePowerStatePoweredOn}
	case "TaskInProgress":
		task := types.ManagedObjectReference{Type: "Task", Value: "task-1"}
		return &types.TaskInProgress{Task: task}
	case "ManagedObjectNotFound":
		return &types.ManagedObjectNotFound{Obj: of}
	}
	kind, known := types.TypeFunc()(name)
	if !known {
		panic("no fault " + name)
	}
	return reflect.New(kind).Interface().(types.BaseMethodFault)
}

// What vSphere says about a fault.
var messages = map[string]string{
	"InvalidPowerState": "The attempted operation cannot be performed in the current state (Powered on).",
	"InvalidState":      "The operation is not allowed in the current state.",
	"TaskInProgress":    "The task is already in progress.",
	"NoPermission":      "Permission to perform this operation was denied.",
	"Timedout":          "Operation timed out.",
	"RequestCanceled":   "The task was canceled by a user.",
	"RestrictedVersion": "Current license or ESXi version prohibits execution of the requested operation.",
}

func say(name string) string {
	if text, known := messages[name]; known {
		return text
	}
	return name
}

func localized(name string, of types.ManagedObjectReference) *types.LocalizedMethodFault {
	return &types.LocalizedMethodFault{Fault: named(name, of), LocalizedMessage: say(name)}
}

// refused returns the fault of a method that the scenario wants, or that a missing privilege causes.
func (l *leases) refused(method, privilege string, of types.ManagedObjectReference) types.BaseMethodFault {
	for _, each := range l.Denied {
		if each == privilege {
			return &types.NoPermission{Object: of, PrivilegeId: privilege}
		}
	}
	leaseLock.Lock()
	defer leaseLock.Unlock()
	if wanted, known := l.Faults[method]; known {
		if faulted[method]++; wanted.Times == 0 || faulted[method] <= wanted.Times {
			return named(wanted.Name, of)
		}
	} else {
		delete(faulted, method)
	}
	return nil
}

func soapFault_(fault types.BaseMethodFault) *soap.Fault {
	return Fault(say(reflect.TypeOf(fault).Elem().Name()), fault)
}

// currentDisks are those of the machine: a snapshot that was made here moved each to a file of its own.
func currentDisks(s *Scenario) []disk {
	leaseLock.Lock()
	defer leaseLock.Unlock()
	disks := append([]disk{}, s.Disks...)
	for i := range disks {
		for _, each := range taken {
			disks[i].Parents = append([]string{disks[i].File}, disks[i].Parents...)
			disks[i].File = strings.TrimSuffix(disks[i].File, ".vmdk") + "-" + each.Value + ".vmdk"
		}
	}
	return disks
}

// ExportVm makes a lease of a machine that is off.
func (vm *VirtualMachine) ExportVm(ctx *Context, req *types.ExportVm) soap.HasFault {
	body := new(methods.ExportVmBody)
	s := mustRead()
	record(map[string]interface{}{"call": "ExportVm", "machine": vm.Self.Value})
	if fault := s.Lease.refused("ExportVm", "VApp.Export", vm.Self); fault != nil {
		body.Fault_ = soapFault_(fault)
		return body
	}
	if s.PowerState != "poweredOff" {
		body.Fault_ = soapFault_(&types.InvalidPowerState{
			RequestedState: types.VirtualMachinePowerStatePoweredOff,
			ExistingState:  types.VirtualMachinePowerState(s.PowerState),
		})
		return body
	}
	lease, fault := begin(ctx, s, vm.Self, vm.Self, "current")
	if fault != nil {
		body.Fault_ = soapFault_(fault)
		return body
	}
	body.Res = &types.ExportVmResponse{Returnval: lease.Self}
	return body
}

// ExportSnapshot makes a lease of a machine at a snapshot.
func (v *VirtualMachineSnapshot) ExportSnapshot(ctx *Context, req *types.ExportSnapshot) soap.HasFault {
	body := new(methods.ExportSnapshotBody)
	s := mustRead()
	record(map[string]interface{}{"call": "ExportSnapshot", "snapshot": v.Self.Value})
	if fault := s.Lease.refused("ExportSnapshot", "VApp.Export", v.Vm); fault != nil {
		body.Fault_ = soapFault_(fault)
		return body
	}
	lease, fault := begin(ctx, s, v.Vm, v.Self, v.Self.Value)
	if fault != nil {
		body.Fault_ = soapFault_(fault)
		return body
	}
	body.Res = &types.ExportSnapshotResponse{Returnval: lease.Self}
	return body
}

func begin(
	ctx *Context, s *Scenario, vm, exported types.ManagedObjectReference, state string,
) (*ExportLease, types.BaseMethodFault) {
	leaseLock.Lock()
	defer leaseLock.Unlock()
	if held != nil {
		held.look(s)
	}
	if held != nil {
		return nil, named("TaskInProgress", vm)
	}
	number++
	lease := &ExportLease{
		id: fmt.Sprintf("%s.%d", state, number), exported: exported, registry: ctx.Session.Registry,
		// The simulator looks twice for one question.
		reported: time.Now(), reads: 2 * s.Lease.Initializing, sha256: map[string]bool{},
	}
	// A session has objects of its own, which others do not find.
	lease.Self = types.ManagedObjectReference{
		Type: "HttpNfcLease", Value: fmt.Sprintf("session[%s]%s", ctx.Session.Key, uuid.New()),
	}
	lease.State = types.HttpNfcLeaseStateInitializing
	lease.Info = s.info(lease, vm)
	ctx.Session.Put(lease)
	held = lease
	record(map[string]interface{}{"call": "lease", "lease": lease.id})
	go lease.watch()
	return lease, nil
}

func (s *Scenario) info(lease *ExportLease, vm types.ManagedObjectReference) *types.HttpNfcLeaseInfo {
	info := &types.HttpNfcLeaseInfo{Lease: lease.Self, Entity: vm, LeaseTimeout: s.Lease.Stated}
	if info.LeaseTimeout == 0 {
		info.LeaseTimeout = int32(math.Ceil(s.Lease.Timeout))
	}
	for _, each := range s.Disks {
		info.TotalDiskCapacityInKB += each.Capacity / 1024
	}
	for _, each := range s.Lease.Devices {
		if each.Independent && lease.exported != vm {
			continue
		}
		isDisk := each.Disk
		info.DeviceUrl = append(info.DeviceUrl, types.HttpNfcLeaseDeviceUrl{
			Key: "/" + vm.Value + "/" + each.Key, ImportKey: each.ImportKey,
			Url:           strings.Replace(each.URL, "{id}", lease.id, 1),
			SslThumbprint: each.Thumbprint, Disk: &isDisk, TargetId: each.TargetID, FileSize: each.Size,
		})
	}
	return info
}

// look brings a lease up to date; leaseLock is held.
func (l *ExportLease) look(s *Scenario) {
	ended := ""
	switch {
	case l.State == types.HttpNfcLeaseStateDone || l.State == types.HttpNfcLeaseStateError:
		return
	case s.Lease.Ends != "":
		ended = "another client"
		l.State = types.HttpNfcLeaseStateError
		l.Error = localized("RequestCanceled", l.Self)
		if s.Lease.Ends == "done" {
			l.State, l.Error = types.HttpNfcLeaseStateDone, nil
		} else if s.Lease.Ends == "gone" {
			l.registry.Remove(l.Self)
		}
	case time.Since(l.reported).Seconds() > s.Lease.Timeout:
		ended = "timed out"
		l.State = types.HttpNfcLeaseStateError
		l.Error = localized("Timedout", l.Self)
	case l.State == types.HttpNfcLeaseStateInitializing && l.reads <= 0 && s.Lease.Fails != "":
		ended = "failed"
		l.State = types.HttpNfcLeaseStateError
		l.Error = localized(s.Lease.Fails, l.Self)
	case l.State == types.HttpNfcLeaseStateInitializing && l.reads <= 0:
		l.State = types.HttpNfcLeaseStateReady
	}
	if ended != "" {
		l.end(ended)
	}
}

// end frees the machine; leaseLock is held.
func (l *ExportLease) end(why string) {
	record(map[string]interface{}{"call": "ended", "lease": l.id, "why": why})
	if held == l {
		held = nil
	}
}

// watch ends a lease when it is time, for its URLs end with it.
func (l *ExportLease) watch() {
	for {
		time.Sleep(watchEvery)
		s, err := readScenario()
		leaseLock.Lock()
		if err == nil {
			l.look(s)
		}
		isHeld := held == l
		leaseLock.Unlock()
		if !isHeld {
			return
		}
	}
}

// Get is the lease as one question finds it.
func (l *ExportLease) Get() mo.Reference {
	s := mustRead()
	leaseLock.Lock()
	defer leaseLock.Unlock()
	l.look(s)
	if l.State == types.HttpNfcLeaseStateInitializing {
		l.reads--
	}
	found := l.HttpNfcLease
	if found.State != types.HttpNfcLeaseStateReady {
		found.Info = nil
	} else {
		found.InitializeProgress = 100
	}
	return &found
}

// asked records a call and returns its fault; leaseLock is held then, until done is called.
func (l *ExportLease) asked(method string, arguments map[string]interface{}) (s *Scenario, fault *soap.Fault) {
	s = mustRead()
	arguments["call"], arguments["lease"] = method, l.id
	record(arguments)
	if fault := s.Lease.refused(method, "VApp.Export", l.Self); fault != nil {
		leaseLock.Lock()
		return s, soapFault_(fault)
	}
	leaseLock.Lock()
	l.look(s)
	switch {
	case l.State == types.HttpNfcLeaseStateReady:
		return s, nil
	case l.Error != nil && method != "HttpNfcLeaseAbort":
		return s, soapFault_(l.Error.Fault)
	case method == "HttpNfcLeaseAbort":
		return s, nil
	}
	return s, soapFault_(&types.InvalidState{})
}

// HttpNfcLeaseProgress keeps a lease.
func (l *ExportLease) HttpNfcLeaseProgress(ctx *Context, req *types.HttpNfcLeaseProgress) soap.HasFault {
	body := new(methods.HttpNfcLeaseProgressBody)
	_, body.Fault_ = l.asked("HttpNfcLeaseProgress", map[string]interface{}{"percent": req.Percent})
	defer leaseLock.Unlock()
	if body.Fault_ == nil {
		l.reported, l.TransferProgress = time.Now(), req.Percent
		body.Res = new(types.HttpNfcLeaseProgressResponse)
	}
	return body
}

// HttpNfcLeaseComplete ends a lease, which is no object any more.
func (l *ExportLease) HttpNfcLeaseComplete(ctx *Context, req *types.HttpNfcLeaseComplete) soap.HasFault {
	body := new(methods.HttpNfcLeaseCompleteBody)
	_, body.Fault_ = l.asked("HttpNfcLeaseComplete", map[string]interface{}{})
	defer leaseLock.Unlock()
	if body.Fault_ == nil {
		l.State = types.HttpNfcLeaseStateDone
		l.end("completed")
		l.registry.Remove(l.Self)
		body.Res = new(types.HttpNfcLeaseCompleteResponse)
	}
	return body
}

// HttpNfcLeaseAbort ends a lease in any state.
func (l *ExportLease) HttpNfcLeaseAbort(ctx *Context, req *types.HttpNfcLeaseAbort) soap.HasFault {
	body := new(methods.HttpNfcLeaseAbortBody)
	arguments := map[string]interface{}{}
	if req.Fault != nil {
		arguments["fault"] = req.Fault.LocalizedMessage
	}
	_, body.Fault_ = l.asked("HttpNfcLeaseAbort", arguments)
	defer leaseLock.Unlock()
	if body.Fault_ == nil {
		if held == l {
			l.end("aborted")
		}
		l.State = types.HttpNfcLeaseStateError
		l.registry.Remove(l.Self)
		body.Res = new(types.HttpNfcLeaseAbortResponse)
	}
	return body
}

// HttpNfcLeaseSetManifestChecksumType says which digests the manifest has besides SHA-1.
func (l *ExportLease) HttpNfcLeaseSetManifestChecksumType(
	ctx *Context, req *types.HttpNfcLeaseSetManifestChecksumType,
) soap.HasFault {
	body := new(methods.HttpNfcLeaseSetManifestChecksumTypeBody)
	asked := map[string]interface{}{}
	for _, each := range req.DeviceUrlsToChecksumTypes {
		asked[each.Key] = each.Value
	}
	s, fault := l.asked("HttpNfcLeaseSetManifestChecksumType", map[string]interface{}{"types": asked})
	defer leaseLock.Unlock()
	if s.Lease.NoChecksumType {
		fault = soapFault_(&types.MethodNotFound{Receiver: l.Self, Method: "HttpNfcLeaseSetManifestChecksumType"})
	}
	for _, each := range req.DeviceUrlsToChecksumTypes {
		if each.Value != "sha1" && each.Value != "sha256" {
			fault = soapFault_(&types.InvalidArgument{InvalidProperty: "deviceUrlsToChecksumTypes"})
		}
	}
	if body.Fault_ = fault; fault == nil {
		for _, each := range req.DeviceUrlsToChecksumTypes {
			l.sha256[each.Key] = each.Value == "sha256"
		}
		body.Res = new(types.HttpNfcLeaseSetManifestChecksumTypeResponse)
	}
	return body
}

// HttpNfcLeaseGetManifest says what the host has sent.
func (l *ExportLease) HttpNfcLeaseGetManifest(
	ctx *Context, req *types.HttpNfcLeaseGetManifest,
) soap.HasFault {
	body := new(methods.HttpNfcLeaseGetManifestBody)
	s, fault := l.asked("HttpNfcLeaseGetManifest", map[string]interface{}{})
	defer leaseLock.Unlock()
	if s.Lease.NoManifest {
		fault = soapFault_(&types.MethodNotFound{Receiver: l.Self, Method: "HttpNfcLeaseGetManifest"})
	}
	if body.Fault_ = fault; fault != nil {
		return body
	}
	body.Res = new(types.HttpNfcLeaseGetManifestResponse)
	for _, each := range s.Lease.Manifests[l.id] {
		key := "/" + l.Info.Entity.Value + "/" + each.Key
		made := types.HttpNfcLeaseManifestEntry{
			Key: key, Sha1: each.SHA1, Size: each.Size, Disk: each.Disk,
			Capacity: each.Capacity, PopulatedSize: each.Populated,
		}
		if l.sha256[key] {
			made.Checksum, made.ChecksumType = each.SHA256, "sha256"
		}
		body.Res.Returnval = append(body.Res.Returnval, made)
	}
	return body
}

// running runs a task, after the time that the scenario wants.
func running(
	s *Scenario, of mo.Reference, name string, run func() (types.AnyType, types.BaseMethodFault),
) types.ManagedObjectReference {
	task := CreateTask(of, name, func(*Task) (types.AnyType, types.BaseMethodFault) {
		method := strings.ToUpper(name[:1]) + name[1:]
		if fault := s.Lease.refused(method, "", of.Reference()); fault != nil {
			return nil, fault
		}
		return run()
	})
	if s.Lease.Task == 0 {
		return task.Run()
	}
	go func() {
		time.Sleep(time.Duration(s.Lease.Task * float64(time.Second)))
		task.Run()
	}()
	return task.Self
}

// done returns the result of a task that has run.
func done(task types.ManagedObjectReference) (types.AnyType, types.BaseMethodFault) {
	info := Map.Get(task).(*Task).Info
	if info.Error != nil {
		return nil, info.Error.Fault
	}
	return info.Result, nil
}

// CreateSnapshotTask makes a snapshot of the disks as they are.
func (vm *VirtualMachine) CreateSnapshotTask(ctx *Context, req *types.CreateSnapshot_Task) soap.HasFault {
	body := new(methods.CreateSnapshot_TaskBody)
	s := mustRead()
	record(map[string]interface{}{
		"call": "CreateSnapshot_Task", "name": req.Name, "description": req.Description,
		"memory": req.Memory, "quiesce": req.Quiesce,
	})
	privilege := "VirtualMachine.State.CreateSnapshot"
	if fault := s.Lease.refused("CreateSnapshot_Task", privilege, vm.Self); fault != nil {
		body.Fault_ = soapFault_(fault)
		return body
	}
	task := running(s, vm, "createSnapshot", func() (types.AnyType, types.BaseMethodFault) {
		plain := vm.plainCreateSnapshotTask(req).(*methods.CreateSnapshot_TaskBody)
		result, fault := done(plain.Res.Returnval)
		if fault != nil {
			return nil, fault
		}
		made := result.(types.ManagedObjectReference)
		snapshot := Map.Get(made).(*VirtualMachineSnapshot)
		var disks []disk
		for _, each := range currentDisks(s) {
			if !strings.HasPrefix(each.Mode, "independent") {
				disks = append(disks, each)
			}
		}
		snapshot.Config.Hardware.Device = devices(vm.Config.Hardware.Device, disks)
		leaseLock.Lock()
		taken = append(taken, made)
		leaseLock.Unlock()
		record(map[string]interface{}{"call": "created", "name": req.Name, "snapshot": made.Value})
		return made, nil
	})
	body.Res = &types.CreateSnapshot_TaskResponse{Returnval: task}
	return body
}

// RemoveSnapshotTask removes a snapshot that is not exported.
func (v *VirtualMachineSnapshot) RemoveSnapshotTask(ctx *Context, req *types.RemoveSnapshot_Task) soap.HasFault {
	body := new(methods.RemoveSnapshot_TaskBody)
	s := mustRead()
	record(map[string]interface{}{
		"call": "RemoveSnapshot_Task", "snapshot": v.Self.Value, "removeChildren": req.RemoveChildren,
		"consolidate": req.Consolidate,
	})
	privilege := "VirtualMachine.State.RemoveSnapshot"
	if fault := s.Lease.refused("RemoveSnapshot_Task", privilege, v.Vm); fault != nil {
		body.Fault_ = soapFault_(fault)
		return body
	}
	leaseLock.Lock()
	isExported := held != nil && held.exported == v.Self
	leaseLock.Unlock()
	if isExported {
		body.Fault_ = soapFault_(named("TaskInProgress", v.Vm))
		return body
	}
	task := running(s, Map.Get(v.Vm), "removeSnapshot", func() (types.AnyType, types.BaseMethodFault) {
		plain := v.plainRemoveSnapshotTask(ctx, req).(*methods.RemoveSnapshot_TaskBody)
		result, fault := done(plain.Res.Returnval)
		if fault != nil {
			return nil, fault
		}
		leaseLock.Lock()
		var kept []types.ManagedObjectReference
		for _, each := range taken {
			if each != v.Self {
				kept = append(kept, each)
			}
		}
		taken = kept
		leaseLock.Unlock()
		record(map[string]interface{}{"call": "removed", "snapshot": v.Self.Value})
		return result, nil
	})
	body.Res = &types.RemoveSnapshot_TaskResponse{Returnval: task}
	return body
}

// ServeBehind answers the URLs with * as their host: a host serves them itself.
func ServeBehind(w http.ResponseWriter, r *http.Request) {
	behind, err := url.Parse(mustRead().Lease.Behind)
	if err != nil {
		panic(err)
	}
	proxy := httputil.NewSingleHostReverseProxy(behind)
	proxy.FlushInterval = -1
	proxy.Transport = &http.Transport{
		TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, DisableCompression: true,
	}
	proxy.ServeHTTP(w, r)
}
