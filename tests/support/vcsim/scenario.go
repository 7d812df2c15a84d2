// The part of vcsim that is ours: a virtual machine with disks and snapshots, and QueryChangedDiskAreas, which
// the simulator lacks. Compiled into a copy of its package (tools/vmware), for it reaches inside.

package simulator

import (
	"encoding/json"
	"os"
	"strconv"

	"github.com/vmware/govmomi/vim25"
	"github.com/vmware/govmomi/vim25/methods"
	"github.com/vmware/govmomi/vim25/mo"
	"github.com/vmware/govmomi/vim25/soap"
	"github.com/vmware/govmomi/vim25/types"
)

// vCenter answers with about this many areas at most.
const mostAreas = 2000

type disk struct {
	Key, Controller, Unit int32
	Label, Mode           string
	ObjectID              string
	File                  string
	ChangeID              string
	Parents               []string
	Capacity              int64
}

type snapshot struct {
	ID, Name string
	Disks    []disk
}

// Scenario is what a test wants to find; the file is read anew for each question.
type Scenario struct {
	UUID, InstanceUUID string
	// The version of the API; read when the server starts.
	API        string
	PowerState string
	Disks      []disk
	Snapshots  []snapshot
	// By snapshot, key of the disk and change id: start and length of each changed area, in bytes.
	Changes map[string]map[string]map[string][][2]int64
	// After so many answers of a session it is gone; 0: never.
	Answers int
	// The bytes of the disk that one list of changed areas covers; 0: all.
	Covers int64
	Lease  leases
}

var (
	scenarioPath string
	answers      = map[string]int{}
)

func readScenario() (*Scenario, error) {
	text, err := os.ReadFile(scenarioPath)
	if err != nil {
		return nil, err
	}
	found := new(Scenario)
	return found, json.Unmarshal(text, found)
}

func mustRead() *Scenario {
	found, err := readScenario()
	if err != nil {
		panic(err)
	}
	return found
}

// disk returns the one with a key, at a snapshot or now ("").
func (s *Scenario) disk(snapshot string, key int32) *disk {
	all := s.Disks
	for _, each := range s.Snapshots {
		if each.ID == snapshot {
			all = each.Disks
		}
	}
	for i := range all {
		if all[i].Key == key {
			return &all[i]
		}
	}
	return nil
}

func (d disk) backing() *types.VirtualDiskFlatVer2BackingInfo {
	all := append([]string{d.File}, d.Parents...)
	var below *types.VirtualDiskFlatVer2BackingInfo
	for i := len(all) - 1; i >= 0; i-- {
		info := &types.VirtualDiskFlatVer2BackingInfo{DiskMode: d.Mode, Parent: below}
		info.FileName = all[i]
		below = info
	}
	below.ChangeId = d.ChangeID
	return below
}

// devices returns those of a machine with other disks, and the controllers that these may have.
func devices(devices []types.BaseVirtualDevice, disks []disk) []types.BaseVirtualDevice {
	var kept []types.BaseVirtualDevice
	for _, device := range devices {
		_, isDisk := device.(*types.VirtualDisk)
		_, isController := device.(types.BaseVirtualSCSIController)
		_, isAHCI := device.(*types.VirtualAHCIController)
		if !isDisk && !isController && !isAHCI {
			kept = append(kept, device)
		}
	}
	scsi, ahci := new(types.ParaVirtualSCSIController), new(types.VirtualAHCIController)
	scsi.Key, ahci.Key = 1000, 15000
	scsi.SharedBus = types.VirtualSCSISharingNoSharing
	kept = append(kept, scsi, ahci)
	for _, each := range disks {
		unit := each.Unit
		made := &types.VirtualDisk{
			CapacityInKB: each.Capacity / 1024, CapacityInBytes: each.Capacity, DiskObjectId: each.ObjectID,
		}
		made.Key, made.ControllerKey, made.UnitNumber = each.Key, each.Controller, &unit
		made.Backing = each.backing()
		made.DeviceInfo = &types.Description{Label: each.Label, Summary: ""}
		kept = append(kept, made)
	}
	return kept
}

// Get is the machine as a question finds it.
func (vm *VirtualMachine) Get() mo.Reference {
	s, err := readScenario()
	if err != nil || vm.Config == nil || vm.Config.InstanceUuid != s.InstanceUUID {
		return vm
	}
	found := vm.VirtualMachine
	found.Runtime.PowerState = types.VirtualMachinePowerState(s.PowerState)
	config := *vm.Config
	config.Hardware.Device = devices(config.Hardware.Device, currentDisks(s))
	found.Config = &config
	return &found
}

// Play makes the scenario's virtual machine of one of the model's.
func Play(path string) error {
	scenarioPath = path
	s, err := readScenario()
	if err != nil {
		return err
	}
	about := &Map.Get(vim25.ServiceInstance).(*ServiceInstance).Content.About
	about.ApiVersion = s.API
	vm := Map.Any("VirtualMachine").(*VirtualMachine)
	vm.Config.Uuid, vm.Config.InstanceUuid = s.UUID, s.InstanceUUID
	vm.Runtime.PowerState = types.VirtualMachinePowerState(s.PowerState)
	hardware := vm.Config.Hardware.Device
	var tree *types.VirtualMachineSnapshotTree
	for i := len(s.Snapshots) - 1; i >= 0; i-- {
		each := s.Snapshots[i]
		object := new(VirtualMachineSnapshot)
		object.Self = types.ManagedObjectReference{Type: "VirtualMachineSnapshot", Value: each.ID}
		object.Vm = vm.Self
		object.Config = *vm.Config
		object.Config.Hardware.Device = devices(hardware, each.Disks)
		Map.Put(object)
		next := &types.VirtualMachineSnapshotTree{Snapshot: object.Self, Vm: vm.Self, Name: each.Name}
		next.State = vm.Runtime.PowerState
		if tree != nil {
			next.ChildSnapshotList = []types.VirtualMachineSnapshotTree{*tree}
		}
		tree = next
	}
	vm.Config.Hardware.Device = devices(hardware, s.Disks)
	if tree != nil {
		vm.Snapshot = &types.VirtualMachineSnapshotInfo{
			RootSnapshotList: []types.VirtualMachineSnapshotTree{*tree},
		}
		last := s.Snapshots[len(s.Snapshots)-1].ID
		vm.Snapshot.CurrentSnapshot = &types.ManagedObjectReference{Type: "VirtualMachineSnapshot", Value: last}
	}
	return nil
}

// QueryChangedDiskAreas answers one page.
func (vm *VirtualMachine) QueryChangedDiskAreas(
	ctx *Context, req *types.QueryChangedDiskAreas,
) soap.HasFault {
	body := new(methods.QueryChangedDiskAreasBody)
	s := mustRead()
	if answers[ctx.Session.Key]++; s.Answers > 0 && answers[ctx.Session.Key] > s.Answers {
		ctx.svc.sm.delSession(ctx.Session.Key)
		// pyvmomi wants to know of which object.
		body.Fault_ = Fault("The session is not authenticated.", &types.NotAuthenticated{
			NoPermission: types.NoPermission{Object: vm.Self, PrivilegeId: "System.View"},
		})
		return body
	}
	name := ""
	if req.Snapshot != nil {
		name = req.Snapshot.Value
	}
	record(map[string]interface{}{
		"call": "QueryChangedDiskAreas", "snapshot": name, "key": req.DeviceKey, "changeId": req.ChangeId,
		"startOffset": req.StartOffset,
	})
	areas, known := s.Changes[name][strconv.Itoa(int(req.DeviceKey))][req.ChangeId]
	asked := s.disk(name, req.DeviceKey)
	if !known || asked == nil {
		body.Fault_ = Fault("Error caused by file", &types.FileFault{File: s.Disks[0].File})
		return body
	}
	// Of the machine now, whatever the snapshot has.
	capacity := s.disk("", req.DeviceKey).Capacity
	if req.StartOffset >= capacity {
		body.Fault_ = Fault("A specified parameter was not correct: startOffset",
			&types.InvalidArgument{InvalidProperty: "startOffset"})
		return body
	}
	info := types.DiskChangeInfo{StartOffset: req.StartOffset, Length: capacity - req.StartOffset}
	if s.Covers > 0 && s.Covers < info.Length {
		info.Length = s.Covers
		areas = nil
	}
	for _, area := range areas {
		if area[0] >= 0 && area[1] >= 0 && area[0]+area[1] <= req.StartOffset && req.StartOffset > 0 {
			continue
		}
		if len(info.ChangedArea) == mostAreas {
			last := info.ChangedArea[mostAreas-1]
			info.Length = last.Start + last.Length - req.StartOffset
			break
		}
		info.ChangedArea = append(info.ChangedArea, types.DiskChangeExtent{Start: area[0], Length: area[1]})
	}
	body.Res = &types.QueryChangedDiskAreasResponse{Returnval: info}
	return body
}
